"""The commands that look at one file, or change its metadata alone: verify, hash, meta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from difflora import screen
from difflora.cli_common import DryRun, Family, Force, Json, tell
from difflora.formats.errors import DiffLoRAError, some

app = typer.Typer()
meta = typer.Typer(no_args_is_help=True, help="Read and write the metadata of a file; its tensors stay as they are.")
app.add_typer(meta, name="meta")

SafeFile = Annotated[Path, typer.Argument(help="The .safetensors file.")]
AnyFile = Annotated[str, typer.Argument(help="A file, a folder, a Hub id or a bundled adapter.")]
# Why a file may lack a hash.
_ABSENT = {
    "autov1": "the file ends before the bytes that it is taken of",
    "addnet": "a pickle has none",
    "autov3": "the header claims none",
}
Elsewhere = Annotated[Path | None, typer.Option("--output", "-o", help="Another file; in place takes --force.")]


@app.command()
def verify(
    file: Annotated[str, typer.Argument(help="A file, a folder, a Hub id or a bundled adapter.")],
    family: Family = None,
    weight_name: Annotated[str | None, typer.Option(help="Which file of a folder or a Hub repository.")] = None,
    as_json: Json = False,
) -> None:
    """Check an adapter file: every key, every number, every claim.  Exit code 1 if something is wrong."""
    from difflora import verifying

    found = verifying.verify(file, family=family, weight_name=weight_name)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        lines = [f"problem: {text}" for text in found.problems] + [f"remark: {text}" for text in found.remarks]
        head = f"{found.source}: {found.layout or 'unreadable'}, family {found.family or 'unknown'}, "
        head += f"{found.tensors} tensors in {found.modules} modules, {'sound' if found.ok else 'not sound'}"
        screen.out.print(screen.visible("\n".join([head, *lines])), soft_wrap=True)
    if not found.ok:
        raise typer.Exit(1)


@app.command(name="hash")
def hash_(file: AnyFile, as_json: Json = False) -> None:
    """Print every hash by which sites and programs know a file."""
    from dataclasses import asdict

    from difflora.hashes import hashes

    found = asdict(hashes(_file_of(file)))
    lines = [f"{name} {value or '- (' + _ABSENT[name] + ')'}" for name, value in found.items()]
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))


@meta.command(name="get")
def meta_get(
    file: AnyFile,
    key: Annotated[str | None, typer.Argument(help="One of them; all without it.")] = None,
    as_json: Json = False,
) -> None:
    """Print the metadata of a file."""
    from difflora.headers import metadata_of

    found = metadata_of(_file_of(file))
    if key is not None and key not in found:
        raise DiffLoRAError(f"{file} has no metadata {key!r}; it has {some(sorted(found)) or 'none'}.")
    found = found if key is None else {key: found[key]}
    # One value is for programs and printed as it is; a list is for people, one line each.
    lines = (f"{name}={text}".replace("\n", "\\n") for name, text in found.items())
    plain = found[key] if key is not None else screen.visible("\n".join(lines))
    typer.echo(json.dumps(found, indent=2) if as_json else plain)


@meta.command(name="set")
def meta_set(
    file: SafeFile,
    values: Annotated[list[str], typer.Argument(help="KEY=VALUE ...")],
    output: Elsewhere = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Set metadata of a file."""
    from difflora.headers import set_metadata

    pairs = dict(_pair(value) for value in values)
    found = set_metadata(file, pairs, output, force=force, dry_run=dry_run)
    said = f"{output or file}: {', '.join(pairs)} set, {len(found)} metadata"
    tell({"output": str(output or file), "metadata": found, "written": not dry_run}, as_json, said, dry_run)


@meta.command(name="strip")
def meta_strip(
    file: SafeFile,
    keep: Annotated[list[str] | None, typer.Option(help="A name to keep; may be repeated.")] = None,
    output: Elsewhere = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Take metadata out of a file; what its reader needs stays."""
    from difflora.headers import strip_metadata

    found = strip_metadata(file, keep or (), output, force=force, dry_run=dry_run)
    said = f"{output or file}: left {', '.join(found) or 'nothing'}"
    tell({"output": str(output or file), "metadata": found, "written": not dry_run}, as_json, said, dry_run)


def _file_of(source: str) -> Path:
    from difflora.sources import locate

    return Path(source) if Path(source).is_file() else locate(source).file


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is no KEY=VALUE")
    return key, value
