"""What ``suffix`` must draft, by a slow and obvious search."""

from __future__ import annotations

from specplug.proposers._suffix_kernels import LENGTHS, MAX_MATCH, MAX_OCCURRENCES


def occurrences(tail, texts):
    """Find where the end of ``tail`` occurs in texts: (which text, what follows, match)."""
    found = {}
    for length in reversed(LENGTHS.tolist()):
        for i, text in enumerate(texts):
            for follows in range(len(text) - 1, length - 1, -1):
                reach = min(MAX_MATCH, len(tail), follows)
                match = 0
                while match < reach and text[follows - 1 - match] == tail[-1 - match]:
                    match += 1
                if match >= length and len(found) < MAX_OCCURRENCES:
                    found.setdefault((i, follows), match)
    return [(i, follows, match) for (i, follows), match in found.items()]


def expected(
    own, others=(), *, limit=8, min_confidence=0.0, tokens_per_match=8.0, weight_of_others=0.25
):
    """What must be drafted for a text, with other requests' texts, oldest first; and the scores."""
    others = others[::-1]
    mine, theirs = occurrences(own, [own]), occurrences(own, others)
    if not mine and not theirs:
        return [], []
    longest = max(match for *_, match in mine + theirs)
    draft, scores, confidence = [], [], 1.0
    alive = [
        (texts[i], texts is not others, follows, 2.0 ** (match - longest) * weight * 0.85**n)
        for texts, weight, found in (([own], 1, mine), (others, weight_of_others, theirs))
        for n, (i, follows, match) in enumerate(found)
    ]
    for step in range(min(limit, int(tokens_per_match * longest))):

        def goes_on_with(text, its_own, follows, _, step=step):
            goes_on = text + draft if its_own else text  # a repetition of one's own repeats
            return goes_on[follows + step] if follows + step < len(goes_on) else None

        tally = {}
        for one in alive:
            token = goes_on_with(*one)
            if token is not None:
                tally[token] = tally.get(token, 0) + one[-1]
        if not tally:
            break
        token = max(tally, key=tally.get)
        score = tally[token] / sum(tally.values()) * (1 - 2.0**-longest)
        confidence *= score
        if confidence < min_confidence:
            break
        alive = [one for one in alive if goes_on_with(*one) == token]
        draft.append(token)
        scores.append(score)
    return draft, scores
