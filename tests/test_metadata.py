"""Hashes against hashlib, the texts of pictures word for word, and what sidecars say."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from difflora.formats.errors import DiffLoRAError
from difflora.hashes import hashes, read_header
from difflora.metadata import (
    Applied,
    Job,
    Parameters,
    Triggers,
    parameters,
    read_parameters,
    read_png,
    save_png,
    trigger_words,
)

SSHS = "ABCDEF0123456789" * 4
CIVITAI_TAG = re.compile(r"<(lora|hypernet):([a-zA-Z0-9_\.\-]+):([0-9.]+)>")

JOB = Job(
    prompt="a cat <lora:my style:te=0:unet=0.7>, <lora:墨絵>",
    model="black-forest-labs/FLUX.1-dev",
    pipeline="FluxPipeline",
    seed=4294967295,
    steps=20,
    width=1024,
    height=768,
    scheduler="FlowMatchEulerDiscreteScheduler",
    dtype="bfloat16",
    negative_prompt='blurry: yes, "quoted"\nsecond line',
    guidance=3.5,
    max_sequence_length=512,
    loras=(
        Applied(
            "my style",
            "loras/my style.safetensors",
            (("text_encoder", 0.0), ("transformer", 0.1 + 0.6)),
            (("transformer_blocks.0-9", 0.3),),
            "a" * 64,
            "0123456789ab",
        ),
        Applied("墨絵", "user/repo:x.safetensors@main", (("transformer", 1.0),), (), "b" * 64, "fedcba987654"),
    ),
    versions=(("difflora", "0.1.0"), ("torch", "2.13.0")),
)


def _safetensors(file: Path, metadata: dict[str, str], size: int) -> bytes:
    """Write a file with one uint8 tensor of `size` bytes; its header is padded as the library does."""
    header = {"__metadata__": metadata, "x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + bytes(i * 37 % 251 for i in range(size))
    file.write_bytes(content)
    return content


@pytest.mark.parametrize("size", [10, 0x100000, 0x10FF00, 3 * 0x100000])
def test_hashes_are_those_of_the_bytes(tmp_path: Path, size: int) -> None:
    content = _safetensors(tmp_path / "x.safetensors", {"ss_v2": "False"}, size)
    found = hashes(tmp_path / "x.safetensors")
    whole, tensors = hashlib.sha256(content).hexdigest(), hashlib.sha256(content[-size:]).hexdigest()
    legacy = hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert (found.sha256, found.autov2) == (whole, whole[:10])
    assert (found.addnet, found.lora_hash, found.autov3) == (tensors, tensors[:12], None)
    assert found.autov1 == (legacy if size > 10 else None)


def test_the_hash_of_a_file_that_ends_where_autov1_starts_is_none(tmp_path: Path) -> None:
    room = 0x100000 - len(_safetensors(tmp_path / "x.safetensors", {}, 1000000)) + 1000000
    assert len(_safetensors(tmp_path / "x.safetensors", {}, room)) == 0x100000
    assert hashes(tmp_path / "x.safetensors").autov1 is None
    _safetensors(tmp_path / "x.safetensors", {}, room + 1)
    assert hashes(tmp_path / "x.safetensors").autov1 is not None


@pytest.mark.parametrize(
    ("metadata", "lora_hash", "autov3"),
    [
        ({"sshs_model_hash": SSHS}, "abcdef012345", "abcdef012345"),
        ({"modelspec.hash_sha256": "0x" + SSHS.lower()}, None, "abcdef012345"),
        ({"modelspec.hash_sha256": SSHS}, None, "abcdef012345"),
        ({"sshs_model_hash": "1" * 64, "modelspec.hash_sha256": "0x" + SSHS}, "1" * 12, "1" * 12),
        ({"sshs_model_hash": hashlib.sha256().hexdigest()}, "e3b0c44298fc", None),
        ({"modelspec.hash_sha256": "0x" + hashlib.sha256().hexdigest()}, None, None),
        ({"modelspec.hash_sha256": "0xabc"}, None, None),
    ],
)
def test_what_the_header_claims(
    tmp_path: Path, metadata: dict[str, str], lora_hash: str | None, autov3: str | None
) -> None:
    content = _safetensors(tmp_path / "x.safetensors", metadata, 64)
    found = hashes(tmp_path / "x.safetensors")
    assert found.lora_hash == (lora_hash or hashlib.sha256(content[-64:]).hexdigest()[:12])
    assert found.autov3 == autov3


def test_editing_the_metadata_leaves_addnet(tmp_path: Path) -> None:
    _safetensors(tmp_path / "x.safetensors", {}, 2000000)
    _safetensors(tmp_path / "y.safetensors", {"modelspec.title": "new"}, 2000000)
    before, after = hashes(tmp_path / "x.safetensors"), hashes(tmp_path / "y.safetensors")
    assert before.addnet == after.addnet
    assert before.sha256 != after.sha256
    assert before.autov1 != after.autov1


def test_a_pickle_is_hashed_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"pickle")
    digest = hashlib.sha256(b"pickle").hexdigest()
    found = hashes(tmp_path / "x.pt")
    assert (found.sha256, found.addnet, found.lora_hash) == (digest, None, digest[:12])


def test_addnet_agrees_with_the_library_that_writes_the_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save, save_file

    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.float16)}
    save_file(tensors, tmp_path / "x.safetensors", {"ss_v2": "x", "other": "y"})
    blob = save(tensors, {"ss_v2": "x"})
    expected = hashlib.sha256(blob[8 + int.from_bytes(blob[:8], "little") :]).hexdigest()
    assert hashes(tmp_path / "x.safetensors").addnet == expected
    metadata, shapes = read_header(tmp_path / "x.safetensors")
    assert metadata == {"ss_v2": "x", "other": "y"}
    assert shapes == {"a": ("F16", (3,)), "b": ("F32", (2, 3))}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its header says it is 0 bytes long"),
        (b"short", "bytes long, with 0 bytes left"),
        ((10).to_bytes(8, "little") + b"{}", "10 bytes long, with 2 bytes left"),
        ((10**8 + 1).to_bytes(8, "little") + b"{}", "100000001 bytes long"),
        ((1).to_bytes(8, "little") + b"{", "1 bytes long"),
        ((3).to_bytes(8, "little") + b"abc", "not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "a JSON list, not an object"),
        ((200000).to_bytes(8, "little") + b"[" * 200000, "not JSON"),
        ((22).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}'[:22], "not JSON"),
        ((24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}', "not a map of strings"),
        ((7).to_bytes(8, "little") + b'{"x":1}', "no dtype and shape for 'x'"),
        ((34).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[-1]}}', "no dtype and shape for 'x'"),
    ],
)
def test_a_broken_header_is_an_error_that_names_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(DiffLoRAError, match=re.escape(reason)) as caught:
        read_header(tmp_path / "broken.safetensors")
    assert "broken.safetensors" in str(caught.value)


def test_a_missing_file_is_a_difflora_error(tmp_path: Path) -> None:
    with pytest.raises(DiffLoRAError, match=r"none\.safetensors cannot be opened: No such file"):
        hashes(tmp_path / "none.safetensors")


def test_hashing_needs_no_torch() -> None:
    code = "import sys, difflora.hashes, difflora.metadata; print({'torch', 'PIL', 'safetensors'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_parameters_of_a_distilled_model() -> None:
    assert parameters(JOB) == (
        "a cat , <lora:my_style:0.7> <lora:lora_fedcba98:1>\n"
        'Negative prompt: blurry: yes, "quoted"\nsecond line\n'
        "Steps: 20, Sampler: Euler, Schedule type: Simple, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 4294967295, "
        'Size: 1024x768, Model: FLUX.1-dev, RNG: CPU, Lora hashes: "my_style: 0123456789ab, '
        'lora_fedcba98: fedcba987654", Version: difflora 0.1.0'
    )


def test_parameters_without_adapters() -> None:
    job = Job(
        prompt="a, b",
        model="/models/夢: v2.safetensors",
        pipeline="StableDiffusionXLPipeline",
        seed=1,
        steps=30,
        width=64,
        height=96,
        scheduler="SomeNewScheduler",
        dtype="float16",
        guidance=7.0,
        model_hash="1234567890",
    )
    assert parameters(job) == (
        "a, b\nSteps: 30, Sampler: SomeNew, CFG scale: 7, Seed: 1, Size: 64x96, Model hash: 1234567890, "
        'Model: "夢: v2", RNG: CPU, Version: difflora'
    )


def test_public_names_are_clean_and_distinct() -> None:
    names = ("a b", "a_b", "a_b_2", "a b", "墨", "絵", "x/y\\z-1.0")
    loras = tuple(Applied(name, "", (("unet", 0.5),)) for name in names)
    text = parameters(replace(JOB, prompt="", loras=loras))
    tags = text.split("\n")[0].split(" ")
    assert [CIVITAI_TAG.fullmatch(tag)[2] for tag in tags] == [
        "a_b", "a_b_2", "a_b_2_2", "a_b_3", "lora", "lora_2", "x_y_z-1.0",
    ]  # fmt: skip
    assert "Lora hashes" not in text


@pytest.mark.parametrize(
    ("components", "shown"),
    [
        ((("text_encoder", 0.2), ("unet", 0.9)), "0.9"),
        ((("text_encoder", 0.2),), "0.2"),
        ((), "0"),
        ((("transformer", 0.1 + 0.2),), "0.3"),
        ((("transformer", -0.00001),), "0"),
        ((("transformer", -1.5),), "-1.5"),
        ((("transformer", 0.0001),), "0.0001"),
    ],
)
def test_the_one_number_of_a_tag_is_the_denoisers(components: tuple[tuple[str, float], ...], shown: str) -> None:
    job = replace(JOB, prompt="", loras=(Applied("x", "", components),))
    assert parameters(job).startswith(f"<lora:x:{shown}>\n")


def test_a1111_reads_the_parameters_back() -> None:
    read = read_parameters(parameters(JOB))
    assert read.prompt == "a cat , <lora:my_style:0.7> <lora:lora_fedcba98:1>"
    assert read.negative_prompt == JOB.negative_prompt
    assert read.fields == {
        "Steps": "20",
        "Sampler": "Euler",
        "Schedule type": "Simple",
        "CFG scale": "1",
        "Distilled CFG Scale": "3.5",
        "Seed": "4294967295",
        "Size-1": "1024",
        "Size-2": "768",
        "Model": "FLUX.1-dev",
        "RNG": "CPU",
        "Lora hashes": "my_style: 0123456789ab, lora_fedcba98: fedcba987654",
        "Version": "difflora 0.1.0",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just a prompt", Parameters("just a prompt", "", {})),
        ("a: 1, b: 2, c: 3", Parameters("a: 1, b: 2, c: 3", "", {})),
        ("sun: 1, sea: 2", Parameters("sun: 1, sea: 2", "", {})),
        ("sun: 1, sea: 2, sky: 3", Parameters("", "", {"sun": "1", "sea": "2", "sky": "3"})),
        ("a\nNegative prompt: b\nc", Parameters("a", "b\nc", {})),
        (
            "two\nlines\nNegative prompt: no\nSteps: 4, Sampler: Euler a, Seed: 7, Size: 512x768",
            Parameters(
                "two\nlines", "no", {"Steps": "4", "Sampler": "Euler a", "Seed": "7", "Size-1": "512", "Size-2": "768"}
            ),
        ),
        (
            'p\nSteps: 4, Model: "a, \\"b\\": \\n猫", Seed: 7',
            Parameters("p", "", {"Steps": "4", "Model": 'a, "b": \n猫', "Seed": "7"}),
        ),
        ('Steps: 4, Bad: "\\x", Seed: 7', Parameters("", "", {"Steps": "4", "Bad": '"\\x"', "Seed": "7"})),
    ],
)
def test_read_parameters(text: str, expected: Parameters) -> None:
    assert read_parameters(text) == expected


@pytest.mark.parametrize("prompt", ["a cat", '猫: "絵"\nline, two\t<b>', "", "ümlaut \\ back", "emoji 🎨 and \x7f"])
def test_a_png_gives_back_the_job_and_the_text(tmp_path: Path, prompt: str) -> None:
    job, image = replace(JOB, prompt=prompt, negative_prompt=prompt), Image.new("RGB", (8, 8), (1, 2, 3))
    save_png(image, tmp_path / "out.png", job)
    text, read = read_png(tmp_path / "out.png")
    assert read == job
    assert text == parameters(job)
    assert [p.name for p in tmp_path.iterdir()] == ["out.png"]
    with Image.open(tmp_path / "out.png") as again:
        assert again.getpixel((0, 0)) == (1, 2, 3)
        assert again.info["parameters"] == parameters(job)


def test_the_json_is_ascii_and_versioned() -> None:
    text = JOB.to_json()
    assert text.isascii()
    data = json.loads(text)
    assert data["version"] == 1
    assert data["loras"][0]["components"] == {"text_encoder": 0.0, "transformer": 0.1 + 0.6}
    assert data["loras"][0]["blocks"] == {"transformer_blocks.0-9": 0.3}
    assert data["versions"] == {"difflora": "0.1.0", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2; this difflora reads version 1"),
        ({"version": None}, "version None"),
        ({"extra": 1}, "extra is missing or unknown"),
        ({"seed": "1"}, r"job\.seed is '1'; expected int"),
        ({"seed": True}, r"job\.seed is True"),
        ({"guidance": "x"}, r"job\.guidance is 'x'"),
        ({"guidance": float("nan")}, "NaN is no number"),
        ({"loras": [1]}, r"job\.loras: int"),
        ({"loras": [{"name": "x"}]}, "is missing or unknown"),
        ({"versions": {"a": 1}}, "the value of a is not a str"),
    ],
)
def test_a_job_that_is_not_one_is_refused(change: dict[str, object], words: str) -> None:
    text = json.dumps(json.loads(JOB.to_json()) | change)
    with pytest.raises(DiffLoRAError, match=words):
        Job.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100000])
def test_text_that_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(DiffLoRAError):
        Job.from_json(text)


def test_a_component_weight_that_is_no_number_is_refused() -> None:
    data = json.loads(JOB.to_json())
    data["loras"][0]["components"]["transformer"] = "1"
    with pytest.raises(DiffLoRAError, match="the value of transformer is not a float"):
        Job.from_json(json.dumps(data))


def test_a_plain_png_has_neither_and_other_files_are_refused(tmp_path: Path) -> None:
    save_png(Image.new("RGB", (8, 8)), tmp_path / "plain.png")
    assert read_png(tmp_path / "plain.png") == (None, None)
    (tmp_path / "no.png").write_bytes(b"not a picture")
    with pytest.raises(DiffLoRAError, match=r"no\.png cannot be read as PNG"):
        read_png(tmp_path / "no.png")


class _Torn:
    """A picture whose encoder fails half way."""

    def save(self, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(b"old")
    with pytest.raises(OSError, match="disk full"):
        save_png(_Torn(), tmp_path / "out.png", JOB)
    assert (tmp_path / "out.png").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.png"]


USER, CIVITAI, MANAGER = "x.v1.json", "x.v1.civitai.info", "x.v1.metadata.json"
PHRASE, HINT = {"modelspec.trigger_phrase": "phrase"}, {"modelspec.usage_hint": "hint"}
SINGLE = {"ss_tag_frequency": json.dumps({"1_trigger": {"trigger": 1}})}


@pytest.mark.parametrize(
    ("sidecars", "metadata", "words", "source"),
    [
        ({}, {}, (), None),
        ({}, SINGLE, ("trigger",), "ss_tag_frequency"),
        ({}, SINGLE | HINT, ("hint",), "modelspec.usage_hint"),
        ({MANAGER: {"trainedWords": ["m1", " m2, ", ""]}}, HINT, ("m1", "m2"), "metadata.json"),
        ({MANAGER: {"civitai": {"trainedWords": ["inner"]}}}, HINT, ("inner",), "metadata.json"),
        ({MANAGER: {"trainedWords": ["m"]}, CIVITAI: {"trainedWords": ["c"]}}, HINT, ("c",), "civitai.info"),
        ({CIVITAI: {"trainedWords": ["c", "c", 3]}}, PHRASE, ("phrase",), "modelspec.trigger_phrase"),
        ({USER: {"activation text": "mine, too"}}, PHRASE, ("mine, too",), "activation text"),
        ({USER: {"activation text": ""}}, PHRASE, ("phrase",), "modelspec.trigger_phrase"),
        ({"x.json": {"activation text": "other file"}}, {}, (), None),
    ],
)
def test_trigger_words_come_from_the_first_that_says_any(
    tmp_path: Path, sidecars: dict[str, object], metadata: dict[str, str], words: tuple[str, ...], source: str | None
) -> None:
    for name, data in sidecars.items():
        (tmp_path / name).write_text(json.dumps(data))
    found = trigger_words(tmp_path / "x.v1.safetensors", metadata)
    assert (found.words, found.source, found.notes) == (words, source, ())


def test_a_sidecar_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    (tmp_path / "x.civitai.info").write_text("{")
    assert trigger_words(tmp_path / "x.safetensors", {}).notes == (
        "x.json beside the file is not a JSON object; not used",
        "x.civitai.info beside the file is not a JSON object; not used",
    )


def test_common_tags_are_summed_over_folders_and_are_no_triggers() -> None:
    counts = {"10_a": {"cat ": 3, "dog": 1}, "2_b": {" cat": 2, "": 9, "bad": "x"}}
    found = trigger_words(None, {"ss_tag_frequency": json.dumps(counts)})
    assert found == Triggers((), None, (("cat", 5), ("dog", 1)))


def test_common_tags_of_captions_are_their_words() -> None:
    counts = {"1_a": {"a photo of a big cat": 2, "the cat in the rain": 1}}
    found = trigger_words(None, {"ss_tag_frequency": json.dumps(counts)})
    assert dict(found.common) == {"photo": 2, "big": 2, "cat": 3, "the": 2, "rain": 1}


def test_only_the_top_of_the_common_tags_is_shown() -> None:
    counts = {"1_a": {f"t{n}": n for n in range(1, 40)}}
    common = trigger_words(None, {"ss_tag_frequency": json.dumps(counts)}).common
    assert len(common) == 24
    assert common[0] == ("t39", 39)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"a": 3}'])
def test_a_broken_tag_frequency_says_nothing(text: str) -> None:
    assert trigger_words(None, {"ss_tag_frequency": text}) == Triggers()
