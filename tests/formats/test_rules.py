"""The rule language: patterns, row counts, permutations."""

import pytest

from difflora.formats.rules import Network, Rule, Table, names, outline, under


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.12.attn1.to_out.0", ("blocks.#.attn1.to_out.#", ("12", "0"))),
        ("blocks_12_attn1_to_out_0", ("blocks_#_attn1_to_out_#", ("12", "0"))),
        ("linear_1", ("linear_#", ("1",))),
        ("norm1_context.linear", ("norm1_context.linear", ())),
        ("blocks.{i}.{j}.x", ("blocks.#.#.x", ("{i}", "{j}"))),
    ],
)
def test_outline(name: str, expected: tuple[str, tuple[str, ...]]) -> None:
    assert outline(name) == expected


def test_table_tells_numbers_from_captures() -> None:
    table = Table([("a.{i}.0", "even"), ("a.{i}.1", "odd"), ("b.{i}.{i}", "twice")])
    assert list(table.find(*outline("a.7.1"))) == [("odd", {"{i}": "7", "1": "1"})]
    assert not list(table.find(*outline("a.7.2")))
    assert [value for value, _ in table.find(*outline("b.3.3"))] == ["twice"]
    assert not list(table.find(*outline("b.3.4")))


def test_numbers_are_compared_as_written() -> None:
    network = Network((Rule("a.0", ("zero",)),), ("b.{i}.c",))
    assert not network.find(*outline("a.00"), flat=False)
    assert list(network.find(*outline("b.01.c"), flat=False)) == [("b.01.c",)]


def test_flattened_spelling_is_derived() -> None:
    network = Network((Rule("a_b.{i}.c", ("x.{i}.y_z",)),), ())
    assert list(network.find(*outline("a_b_3_c"), flat=True)) == [("x.3.y_z",)]
    assert not network.find(*outline("a.b.3.c"), flat=False)
    assert not network.find(*outline("a_b.3.c"), flat=True)


def test_both_meanings_of_one_flattened_spelling_are_found() -> None:
    network = Network((), ("a_b.c", "a.b_c"))
    assert set(network.find(*outline("a_b_c"), flat=True)) == {("a_b.c",), ("a.b_c",)}
    assert list(network.find(*outline("a.b_c"), flat=False)) == [("a.b_c",)]


@pytest.mark.parametrize(
    ("rows", "perm", "size", "expected"),
    [
        ((), (), (10, 3), ((),)),
        (("D", "D", "D"), (), (9, 3), (((0, 3),), ((3, 6),), ((6, 9),))),
        (("D", "D", "D"), (), (10, 3), None),
        (("D", "D", "D"), (), (6, 3), None),
        (("D", "M"), (), (11, 3), (((0, 3),), ((3, 11),))),
        (("D", "M"), (), (3, 3), None),
        (("D", "K", "K"), (), (11, 3), (((0, 3),), ((3, 7),), ((7, 11),))),
        (("D", "K", "K"), (), (10, 3), None),
        ((2, "M"), (), (5, 3), (((0, 2),), ((2, 5),))),
        (("D", "D"), (1, 0), (6, 3), (((3, 6), (0, 3)),)),
        (("D", "D"), (1, 0), (7, 3), None),
    ],
)
def test_row_blocks(
    rows: tuple[str | int, ...],
    perm: tuple[int, ...],
    size: tuple[int, int],
    expected: tuple[tuple[tuple[int, int], ...], ...] | None,
) -> None:
    sections = tuple(f"s{n}" for n in range(1 if perm or not rows else len(rows)))
    assert Rule("source", sections, rows, perm).spans(*size) == expected


def test_alternatives_in_braces() -> None:
    assert names("b.{i}.", "attn{1,2}.to_{q,out.0} {,x_}norm") == (
        *("b.{i}.attn1.to_q", "b.{i}.attn1.to_out.0", "b.{i}.attn2.to_q", "b.{i}.attn2.to_out.0"),
        *("b.{i}.norm", "b.{i}.x_norm"),
    )
    assert under("n.{i}.", "c.{i}.", "{self,cross}.{q,kv} = attn{1,2}.{to_q,kv}\n same") == (
        Rule("n.{i}.self.q", ("c.{i}.attn1.to_q",)),
        Rule("n.{i}.self.kv", ("c.{i}.attn1.kv",)),
        Rule("n.{i}.cross.q", ("c.{i}.attn2.to_q",)),
        Rule("n.{i}.cross.kv", ("c.{i}.attn2.kv",)),
        Rule("n.{i}.same", ("c.{i}.same",)),
    )
    assert under("{a,b}_", "{c,d}.", "{q,k}") == tuple(
        Rule(f"{one}_{x}", (f"{other}.{x}",)) for one, other in ("ac", "bd") for x in "qk"
    )
    assert names("{a,b}.", "x y") == ("a.x", "b.x", "a.y", "b.y")
    fused = (Rule("x.kv", ("c.x.k", "c.x.v"), ("D", "K")), Rule("y.kv", ("c.y.k", "c.y.v"), ("D", "K")))
    assert under("", "c.", "{x,y}.kv = {x,y}.{k,v} : D K") == fused
    assert under("", "c.", "{x,y}.kv = {x,y}.k + {x,y}.v : D K") == fused


def test_lines_that_end_in_a_colon_are_prefixes() -> None:
    text = """
        {t,y}_in.0 = {time,text}.linear
        {a,b}.{i}. = {x,y}.{i}.:
        q = to_q
        norm gate
        {c,d}. = z.:
        w
        :
        last
    """
    assert under("n.", "m.", text) == (
        Rule("n.t_in.0", ("m.time.linear",)),
        Rule("n.y_in.0", ("m.text.linear",)),
        *(
            Rule(f"n.{one}.{{i}}.{name}", (f"m.{two}.{{i}}.{target}",))
            for name, target in (("q", "to_q"),)
            for one, two in ("ax", "by")
        ),
        *(Rule(f"n.{one}.{{i}}.{name}", (f"m.{two}.{{i}}.{name}",)) for one, two in ("ax", "by") for name in _KEPT),
        Rule("n.c.w", ("m.z.w",)),
        Rule("n.d.w", ("m.z.w",)),
        Rule("n.last", ("m.last",)),
    )


_KEPT = ("norm", "gate")


def test_rows_that_do_not_add_up_may_be_the_whole_module() -> None:
    (rule,) = under("", "", "mod = norm.linear : D D / 1 0 or whole")
    assert rule == Rule("mod", ("norm.linear",), ("D", "D"), (1, 0), whole=True)
    assert rule.spans(4, 2) == (((2, 4), (0, 2)),)
    assert rule.spans(12, 2) == ((),)
    assert rule.spans(13, 0) is None


def test_rows_of_heads_in_turn() -> None:
    rule = Rule("qkv", ("q", "k"), ("N", "N"), heads=2)
    assert rule.spans(8, 5) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert rule.spans(6, 5) is None


def test_layers_that_are_numbered_after_a_word() -> None:
    assert outline("blocks.block12.attn.0") == ("blocks.block#.attn.#", ("12", "0"))
    assert outline("blocks_block12_attn") == ("blocks_block#_attn", ("12",))
    assert outline("myblock1.x") == ("myblock1.x", ())


def test_canonical_names_may_be_no_names_in_files() -> None:
    network = Network((Rule("adapter.a", ("a",)),), own=False)
    assert list(network.find(*outline("adapter.a"), flat=False)) == [("a",)]
    assert not network.find(*outline("a"), flat=False)
