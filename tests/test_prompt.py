"""Prompt tags: what is cut, what the numbers mean, and where an error points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflora.formats.errors import DiffLoRAError
from difflora.prompt import Tag, number, parse, render


@pytest.mark.parametrize(
    ("body", "text_encoder", "denoiser"),
    [
        ("style", 1.0, 1.0),
        ("style:0.7", 0.7, 0.7),
        ("style:0.2:0.9", 0.2, 0.9),
        ("style:-0.5", -0.5, -0.5),
        ("style:unet=0.4", 1.0, 0.4),
        ("style:te=0.4", 0.4, 0.4),
        ("style:te=0:unet=1.5", 0.0, 1.5),
        ("style:unet=1.5:te=0", 0.0, 1.5),
        ("style:0.3:unet=0.9", 0.3, 0.9),
        ("style:0.1:0.2:te=0.6", 0.6, 0.2),
        ("style: .5 ", 0.5, 0.5),
        ("style:1e-3", 0.001, 0.001),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "lyco"])
def test_first_number_is_the_text_encoder_second_the_denoiser(
    kind: str, body: str, text_encoder: float, denoiser: float
) -> None:
    text, tags = parse(f"a cat <{kind}:{body}>")
    assert text == "a cat"
    assert tags == (Tag("style", denoiser=denoiser, text_encoder=text_encoder),)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a <lora:x:1> cat", "a cat"),
        ("a<lora:x:1>cat", "acat"),
        ("<lora:x:1> a cat", "a cat"),
        ("a cat <lora:x:1>", "a cat"),
        ("a <lora:x:1> <lora:x:1> cat", "a cat"),
        ("a <lora:x:1>, cat", "a , cat"),
        ("a  big <lora:x:1>  cat", "a  big  cat"),
        ("a\n<lora:x:1>\nb", "a\n\nb"),
        ("  a <lora:x:1>", "a"),
        ("<lora:x>", ""),
        ("猫 <lora:x:1> 犬", "猫 犬"),
    ],
)
def test_a_cut_leaves_no_double_space_of_its_own(prompt: str, text: str) -> None:
    assert parse(prompt)[0] == text


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "  a  cat ",
        "a <b> c",
        "<LORA:x:1>",
        "<Lora:x:1>",
        "<hypernet:x:1>",
        "<lorax:y:1>",
        "a < lora:x >",
        "1 < 2 > 0",
    ],
)
def test_everything_else_in_angle_brackets_is_text(prompt: str) -> None:
    assert parse(prompt) == (prompt, ())


def test_other_brackets_stay_beside_a_tag() -> None:
    assert parse("<b> a <lora:x:1> <hypernet:y:1>") == ("<b> a <hypernet:y:1>", (Tag("x"),))


def test_tags_come_in_order_and_twice_if_they_stand_twice() -> None:
    _, tags = parse("<lora:b:0.5> a <lyco:a:1> and <lora:b:0.25>")
    assert tags == (Tag("b", 0.5, 0.5), Tag("a", 1.0, 1.0), Tag("b", 0.25, 0.25))


def test_names_keep_inner_spaces_equal_signs_and_scripts() -> None:
    assert [tag.name for tag in parse("<lora:my style v1.0:1><lora:e=3-s=9><lora:a=b><lora: 墨絵 >")[1]] == [
        "my style v1.0",
        "e=3-s=9",
        "a=b",
        "墨絵",
    ]


@pytest.mark.parametrize(
    ("prompt", "at", "words"),
    [
        ("a cat <lora:x:abc>", 14, "'abc' is not a finite number"),
        ("a cat <lora:x:1:0,5>", 16, "block weights / schedules inside prompt tags are not supported yet"),
        ("<lora:x:nan>", 8, "'nan' is not a finite number"),
        ("<lora:x:1:inf>", 10, "'inf' is not a finite number"),
        ("<lora:x:1_0>", 8, "'1_0' is not a finite number"),
        ("<lora:x:>", 8, "'' is not a finite number"),
        ("<lora:x:te=b>", 11, "'b' is not a finite number"),
        ("<lora:x:unet=-inf>", 13, "'-inf' is not a finite number"),
        ("<lora:x:a=b=c>", 8, "'a=b=c' is not a finite number"),
        ("hi <lora::1>", 9, "names no adapter"),
        ("hi <lora:>", 9, "names no adapter"),
        ("hi <lora:  :1>", 9, "names no adapter"),
        ("<lora:x:1:1:8>", 12, "dyn"),
        ("<lora:x:dyn=8>", 8, "dyn"),
        ("<lora:x:1:lbw=ALL>", 10, "block weights / schedules"),
        ("<lora:x:lbwe=ATTNON>", 8, "block weights / schedules"),
        ("<lora:x:1:start=5>", 10, "block weights / schedules"),
        ("<lora:x:1:stop=5>", 10, "block weights / schedules"),
        ("<lora:x:1:step=2-5>", 10, "use set_loras(...)"),
        ("<lora:x:0@0,1@0.5>", 8, "block weights / schedules"),
        ("<lora:x:te=0~0>", 11, "block weights / schedules"),
        ("<lora:x:1:clip=1>", 10, "'clip' is no argument of a tag; expected te= or unet="),
        ("<lora:x:TE=1>", 8, "'TE' is no argument"),
        ("<lora:x:te=1:te=2>", 13, "te= is given twice"),
        ("a <lora:x:1", 2, "not closed"),
        ("a <lora:x <lora:y:1>", 2, "not closed"),
        ("<lora:ok:1> a <lora:y:z>", 22, "'z'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_caret_below_it(prompt: str, at: int, words: str) -> None:
    with pytest.raises(DiffLoRAError) as caught:
        parse(prompt)
    reason, line, caret = str(caught.value).split("\n")
    assert words in reason
    assert reason.endswith(f"(position {at})")
    assert line == "  " + prompt
    assert caret == "  " + " " * at + "^"


def test_the_caret_counts_wide_characters_twice_and_shows_only_its_line() -> None:
    with pytest.raises(DiffLoRAError) as caught:
        parse("first line\n猫の絵 <lora:x:é>\nlast")
    assert str(caught.value).split("\n")[1:] == ["  猫の絵 <lora:x:é>", "  " + " " * (6 + 9) + "^"]


def test_a_long_prompt_is_shown_around_the_place() -> None:
    with pytest.raises(DiffLoRAError) as caught:
        parse("a " * 500 + "<lora:x:b>" + " c" * 500)
    _, line, caret = str(caught.value).split("\n")
    assert len(line) <= 2 + 2 * 60
    assert line[len(caret) - 1 :].startswith("b> c")


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ((), ""),
        ((Tag("a"),), "<lora:a:1>"),
        ((Tag("a", 0.7, 0.7),), "<lora:a:0.7>"),
        ((Tag("a", 0.7, 0.0), Tag("b", -0.5, -0.5)), "<lora:a:te=0:unet=0.7><lora:b:-0.5>"),
    ],
)
def test_render_names_the_weights_only_where_they_differ(tags: tuple[Tag, ...], text: str) -> None:
    assert render(tags) == text


@pytest.mark.parametrize(
    "tag", [Tag("a:b"), Tag("a>b"), Tag(""), Tag(" a"), Tag("a", float("nan")), Tag("a", 1, 1e999)]
)
def test_render_refuses_what_no_tag_can_hold(tag: Tag) -> None:
    with pytest.raises(DiffLoRAError, match=r"expected"):
        render([tag])


@pytest.mark.parametrize(("value", "text"), [(1, "1"), (0.0, "0"), (0.1 + 0.2, "0.30000000000000004"), (-2.5, "-2.5")])
def test_number_is_short_and_exact(value: float, text: str) -> None:
    assert number(value) == text


_NAMES = st.text(st.characters(blacklist_characters=":<>\n", blacklist_categories=("Cs",)), min_size=1).filter(
    lambda name: name == name.strip() and name
)
_WEIGHTS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.builds(Tag, _NAMES, _WEIGHTS, _WEIGHTS), min_size=1), st.text(alphabet="ab ,.猫", max_size=12))
def test_parse_reads_back_what_render_writes(tags: list[Tag], text: str) -> None:
    assert parse(text + render(tags)) == (text.strip(), tuple(tags))
