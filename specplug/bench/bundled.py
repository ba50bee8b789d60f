"""The bundled prompts: the demo's, more of their kinds, and work where little repeats."""

from __future__ import annotations

from specplug.bench.work import chat
from specplug.demo.prompts import PROMPTS as DEMO

_INTERVALS = """\
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals):
    return sum(end - start for start, end in merge(intervals))


def overlaps(intervals, start, end):
    for other_start, other_end in merge(intervals):
        if other_start < end and start < other_end:
            return True
    return False
"""

_INTERVIEW = """\
Reporter: Your orchard lost half of its apples to frost last April. What did you change?
Hanna Vogel: We planted two hundred trees that bloom ten days later. Nobody believed me when I \
said that late is the new early.
Reporter: Does that cost you customers?
Hanna Vogel: Some. But a customer who gets apples in October comes back, and one who gets none in \
September does not.
Reporter: What do you tell other growers?
Hanna Vogel: Keep a diary of the weather. Your memory plants the wrong trees.\
"""

_INVOICE = """\
Invoice 2024-0391 of Lakeside Printing, 3 Mill Road, Keswick CA12 5NB, dated 14 March, for \
Riverbank School: 400 programmes at 0.85, 25 posters at 6.40, 2 banners at 48.00, delivery 12.50. \
Payment is due within 30 days to account 20-44-91 83910274.\
"""

PROMPTS = (
    *DEMO,
    chat(
        "types",
        "code edit",
        f"```python\n{_INTERVALS}```\n\nAdd type hints to these functions. Keep everything else.",
        180,
    ),
    chat("interview", "quotes", f"{_INTERVIEW}\n\nList everything that Hanna Vogel said.", 150),
    chat("invoice", "JSON", f"{_INVOICE}\n\nWrite this invoice as JSON.", 180),
    chat("lighthouse", "story", "Tell me a story about a lighthouse keeper and a whale.", 180),
    chat("sky", "chat", "Explain to a ten year old why the sky is blue.", 150),
    chat("interview advice", "chat", "Give me advice for my first job interview.", 150),
    chat("tea", "chat", "What are the main kinds of tea, and how do they differ?", 150),
    chat("primes", "code", "Write a Python function that returns all primes below n.", 180),
    chat(
        "words",
        "code",
        "Write a Python script that counts the words of each file in a folder.",
        180,
    ),
)
