"""The example keeps the rules of specplug's conformance kit."""

from specplug_pair_lookup import pair_lookup

from specplug.testing import ProposerConformance, draft


class TestPairLookup(ProposerConformance):
    spec = pair_lookup


def test_it_continues_as_the_text_went_on():
    assert draft(pair_lookup, [5, 6, 7, 8, 9, 5, 6], max_tokens=3) == [7, 8, 9]
