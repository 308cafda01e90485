"""The record behind the README's support table is what the library does today."""

import json

import support

from difflora.formats.families import FAMILIES
from difflora.formats.refusals import REFUSALS


def test_the_record_is_what_is_measured() -> None:
    measured = support.measure()
    assert measured == json.loads(support.RECORD.read_text())
    assert measured["families"] == [family.name for family in FAMILIES]
    assert set(measured["refused"].values()) == {support.UNEVEN}
    assert {name.split(", ")[2] for name in measured["refused"]} == {"OFT", "BOFT"}
    assert len(support.LAYOUTS) * len(support.KINDS) > 80


def test_every_refusal_says_why() -> None:
    assert all(refusal.reason and (refusal.tails or refusal.heads) for refusal in REFUSALS)
