"""What the demo asks: four workloads, from answers that copy the prompt to ones that do not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the demo."""

    name: str
    workload: str
    text: str
    max_tokens: int


_INVENTORY = """\
class Inventory:
    def __init__(self, warehouse, currency="EUR"):
        self.warehouse = warehouse
        self.currency = currency
        self.items = {}
        self.history = []

    def add(self, sku, quantity, unit_price):
        if quantity <= 0:
            raise ValueError(f"quantity of {sku} must be positive, not {quantity}")
        if sku in self.items:
            old_quantity, old_price = self.items[sku]
            total = old_quantity * old_price + quantity * unit_price
            self.items[sku] = (old_quantity + quantity, total / (old_quantity + quantity))
        else:
            self.items[sku] = (quantity, unit_price)
        self.history.append(("add", sku, quantity))

    def remove(self, sku, quantity):
        if sku not in self.items:
            raise KeyError(f"{sku} is not stored in {self.warehouse}")
        old_quantity, price = self.items[sku]
        if quantity > old_quantity:
            raise ValueError(f"only {old_quantity} of {sku} left in {self.warehouse}")
        if quantity == old_quantity:
            del self.items[sku]
        else:
            self.items[sku] = (old_quantity - quantity, price)
        self.history.append(("remove", sku, quantity))

    def value(self):
        return sum(quantity * price for quantity, price in self.items.values())
"""

_READINGS = """\
def load_readings(path, station, first_day, last_day):
    readings = []
    skipped = 0
    with open(path) as lines:
        header = next(lines).strip().split(",")
        day_column = header.index("day")
        station_column = header.index("station")
        value_column = header.index("value")
        for line in lines:
            fields = line.strip().split(",")
            if len(fields) != len(header):
                skipped += 1
                continue
            if fields[station_column] != station:
                continue
            day = int(fields[day_column])
            if day < first_day or day > last_day:
                continue
            try:
                value = float(fields[value_column])
            except ValueError:
                skipped += 1
                continue
            readings.append((day, value))
    readings.sort()
    if skipped:
        print(f"skipped {skipped} lines of {path}")
    return readings
"""

_BRIDGE = """\
The town council met on Tuesday evening to decide about the old Miller Bridge. The bridge was \
built in 1931 and has carried buses, lorries and two tram lines ever since. Engineers who \
inspected it in March found cracks in four of its nine steel girders. "The bridge is safe today, \
but I cannot promise that for another winter," said chief engineer Ana Petrov. Repairing the \
girders would cost 2.4 million and close the bridge for seven months. A new bridge would cost 11 \
million and take three years. "We have patched this bridge eleven times since I moved here, and \
every time it was the last time," said shopkeeper Tomas Lindqvist. Mayor Ruth Okafor asked for \
patience. "A new bridge is a promise to our children, a repaired one is a promise to our budget," \
she said. The council voted nine to four to repair the girders first and to plan a new bridge by \
the end of next year.\
"""

_RELEASE = """\
Release 4.2 of the Harbor backup service went out on Monday and was withdrawn on Wednesday. \
Customers with more than one storage region saw backups finish without an error although the \
second region had received nothing. "We tested every region alone, and never two of them \
together," said release manager Ines Carvalho. The fault lay in a retry loop that counted a \
skipped region as a successful one. Around 310 customers were affected, and all of them have been \
told. "No data was lost, but for two days there was one copy where we had promised two," wrote \
support lead Daniel Osei. Version 4.2.1 corrects the loop and adds a check that compares the \
number of objects in each region after every backup. "A backup that nobody has compared is a \
hope, not a backup," Carvalho added.\
"""

_ORDER = """\
Hello, this is Priya Raman from Northwind Cycles. Please book our order with the number \
NC-20817. We need 12 pieces of the hub HB-440 at 38.50 each, 6 pieces of the rim RM-27-BLACK at \
61.00 each and 48 pieces of the spoke SP-264-STEEL at 0.85 each. Deliver to Northwind Cycles, 14 \
Canal Street, Leeds LS1 4DL, before 17 October. The invoice goes to accounts@northwind-cycles.test \
and our telephone number is +44 113 555 0142. Thank you, Priya Raman.\
"""

_STAFF = """\
Marta Silva works in accounting in Lisbon since 2014, her extension is 4410. Jonas Weber works in \
logistics in Hamburg since 2019, his extension is 4427. Aiko Tanaka works in research in Osaka \
since 2021, her extension is 4433. Liam Byrne works in logistics in Dublin since 2016, his \
extension is 4458.\
"""

PROMPTS = (
    Prompt(
        "rename",
        "code edit",
        "Rename the method `remove` to `take_out` in this class. Answer with the whole class and "
        f"nothing else.\n\n```python\n{_INVENTORY}```",
        240,
    ),
    Prompt(
        "docstring",
        "code edit",
        "Add a one-line docstring to this function and change nothing else. Answer with the whole "
        f"function.\n\n```python\n{_READINGS}```",
        240,
    ),
    Prompt(
        "bridge",
        "quotes",
        "Summarise this article in a few sentences. Quote every person in it word for word.\n\n"
        + _BRIDGE,
        180,
    ),
    Prompt(
        "release",
        "quotes",
        "Write a short summary of this report for the management, with the exact quotes.\n\n"
        + _RELEASE,
        180,
    ),
    Prompt(
        "order",
        "JSON",
        "Extract the order as JSON with the keys customer, order_number, items (each with sku, "
        "quantity and unit_price), address, email and phone. Answer with the JSON only.\n\n"
        + _ORDER,
        180,
    ),
    Prompt(
        "staff",
        "JSON",
        "Turn this into a JSON list of objects with the keys name, department, city, since and "
        f"extension. Answer with the JSON only.\n\n{_STAFF}",
        180,
    ),
    Prompt(
        "story",
        "story",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle. Make it "
        "surprising.",
        200,
    ),
)
