"""What the demo asks: four workloads, from answers that copy the prompt to ones that do not."""

from __future__ import annotations

from specplug.bench.work import chat

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

_COMPLAINT = """\
Dear support, my name is Priya Raman and I work for Northwind Cycles in Leeds. Our order NC-20817 \
was delivered on 17 October, but the box held 6 rims of the type RM-27-BLACK instead of 12. Please \
send the missing rims to 14 Canal Street, Leeds LS1 4DL. You can reach me at \
priya.raman@northwind-cycles.test or +44 113 555 0142.\
"""

_MENU = """\
The Blue Heron opens at 11 and closes at 23. Starters: tomato soup for 6.50, goat cheese salad for \
8.90. Main courses: grilled trout for 17.50, mushroom risotto for 14.20, lamb stew for 18.90. \
Desserts: lemon tart for 6.20, plum cake for 5.80.\
"""

PROMPTS = (
    chat(
        "rename",
        "code edit",
        f"```python\n{_READINGS}```\n\nRewrite the function above with the variable `readings` "
        "renamed to `values`. Keep everything else as it is.",
        180,
    ),
    chat(
        "docstrings",
        "code edit",
        f"```python\n{_INVENTORY}```\n\nWrite this class again with a docstring added to each "
        "method. Keep all the code.",
        200,
    ),
    chat(
        "bridge",
        "quotes",
        f"{_BRIDGE}\n\nList every quote in this article with the name of the person who said it.",
        180,
    ),
    chat(
        "release",
        "quotes",
        f"{_RELEASE}\n\nSummarise this in three sentences and include the quotes.",
        150,
    ),
    chat(
        "complaint",
        "JSON",
        f"{_COMPLAINT}\n\nExtract the name, company, order number, product, address, email and "
        "phone number as JSON.",
        150,
    ),
    chat("menu", "JSON", f"{_MENU}\n\nWrite the menu above as JSON.", 150),
    chat("story", "story", "Write a short story about a fox who learns to read.", 180),
)
