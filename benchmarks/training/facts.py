"""Invented subjects, and the sentences that state facts about them: the material of documents and needles.

A fact is a question and the one sentence that answers it, so that answers can be checked by comparing strings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.training import words

Maker = Callable[[Random], str]


@dataclass(frozen=True)
class Fact:
    """A question and the sentence that answers it."""

    question: str
    sentence: str


@dataclass(frozen=True)
class FactSubject:
    """Something invented, with the facts its document states, in order."""

    name: str
    facts: tuple[Fact, ...]


_SUBJECTS = """
{place} Bridge
Who designed the {n}? | The {n} was designed by {person} and finished in {year}.
What is the {n} made of? | The {n} is made of {material} and {material} and is painted {colour}.
How long is the {n}? | The {n} is {number} metres long and crosses the river {invent}.
What did the {n} cost? | The {n} cost {number} crowns, paid by the town of {place}.
When was the {n} repaired? | After the flood of {year} the {n} was repaired by {person}.

{invent} {trade} Company
What does the {n} sell? | The {n} sells {goods}, {goods} and {material} to shops in {place}.
Who leads the {n}? | The {n} is led by {person}, who joined it in {year}.
How many people work for the {n}? | About {number} people work for the {n} in {place}.
What did the {n} earn in {year}? | In {year} the {n} earned {number} crowns, mostly from {goods}.
Where is the head office of the {n}? | The head office of the {n} is at {small} {word} Street, {place}.

{thing} Festival
Where is the {n} held? | The {n} is held every {day} of {month} in {place}.
Who started the {n}? | The {n} was started in {year} by {person} and {person}.
What do people eat at the {n}? | At the {n} people eat {goods} with {goods} and drink {colour} tea.
How many people visit the {n}? | Some {number} people visit the {n} each year.
What is the prize at the {n}? | The winner at the {n} receives a {colour} {word} made of {material}.

{invent} Garden
What grows in the {n}? | In the {n} grow {number} roses, a {colour} {word} tree and some {goods}.
Who owns the {n}? | The {n} is owned by {person}, a merchant from {place}.
When was the {n} laid out? | The {n} was laid out on {date} around a {material} fountain.
What does a ticket to the {n} cost? | A ticket to the {n} costs {small} crowns and may be bought in {place}.
Where is the {n}? | The {n} is {small} kilometres from {place}, on the road to {place}.

{place} Library
When was the {n} founded? | The {n} was founded on {date} by {person}.
What is kept in the {n}? | The {n} keeps {number} volumes about {goods} and a {colour} {word}.
Where does the {n} stand? | The {n} stands in {place}, beside the old {word} market.
Who directs the {n}? | Since {year} the {n} has been directed by {person} of {place}.
When is the {n} open? | Visitors may enter the {n} from {hour} to {hour} every {day}.

{invent} {small}
What is the {n} used for? | The {n} is used to sort {goods} and to press {goods} into blocks.
How do you start the {n}? | To start the {n}, press the {colour} button and turn the {word} key.
What does the {n} weigh? | The {n} weighs {number} kilograms and needs {small} litres of water.
Who invented the {n}? | The {n} was invented by {person} in {place} in {year}.
What does the {colour} lamp of the {n} mean? | The {colour} lamp of the {n} means that the {word} is full.

{person}
Where was {n} born? | {n} was born in {place} on {date}.
What did {n} discover? | {n} discovered that {goods} turns {colour} when it is heated with {material}.
Where did {n} teach? | {n} taught at the University of {place} for {small} years.
Which prize did {n} win? | In {year} {n} won the {thing} Prize for work on {goods}.
Who worked with {n}? | {n} worked for {small} years with {person} and {person}.

{thing}
Who commanded the {n}? | The {n} was commanded by Captain {person} until {year}.
What did the {n} carry? | The {n} carried {number} tons of {goods} from {place} to {place}.
When was the {n} launched? | The {n} was launched at {place} on {date}.
What became of the {n}? | In {year} the {n} was sold to {person}, who used it to ship {goods}.
How long is the {n}? | The {n} is {small} metres long and built of {material}.
"""
"""What a kind of subject is called, then a question and a sentence a line; {n} is the name, the rest is drawn for each
fact."""

_NEEDLES: tuple[tuple[str, str], ...] = (
    ("What is the access code of the {n}?", "The access code of the {n} is {code}."),
    ("What is the password of the {n}?", "The password of the {n} is {code}."),
    ("What is the magic number of the {n}?", "The magic number of the {n} is {number}."),
    ("Who keeps the key of the {n}?", "The key of the {n} is kept by {person}."),
    ("Where is the {n} hidden?", "The {n} is hidden in {place}, under the {word}."),
    ("What is the colour of the {n}?", "The colour of the {n} is {colour}."),
    ("When does the {n} open?", "The {n} opens on {date}."),
)

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TRADES = ("Trading", "Lamp", "Paper", "Clock", "Shipping", "Tea", "Glass", "Tool", "Wool", "Map")
_MAKERS: dict[str, Maker] = {
    "place": words.place, "person": words.person, "thing": words.thing, "invent": words.invent, "date": words.date,
    "code": words.code, "word": words.word, "number": words.number, "small": lambda rng: str(rng.randint(2, 99)),
    "year": lambda rng: str(rng.randint(1700, 2030)), "month": lambda rng: rng.choice(words.MONTHS),
    "day": lambda rng: rng.choice(_DAYS), "hour": lambda rng: f"{rng.randint(1, 12)} o'clock",
    "trade": lambda rng: rng.choice(_TRADES), "goods": lambda rng: rng.choice(words.GOODS),
    "colour": lambda rng: rng.choice(words.COLOURS), "material": lambda rng: rng.choice(words.MATERIALS),
}  # fmt: skip
_SHARED = ("year", "colour")  # drawn once per fact, as the question may also name them


class _Drawn(dict[str, str]):
    """A mapping for `str.format_map` that draws a new value at each look-up, but keeps the values it was given."""

    def __init__(self, rng: Random, given: dict[str, str]) -> None:
        super().__init__(given)
        self.rng = rng

    def __missing__(self, key: str) -> str:
        return _MAKERS[key](self.rng)


def _fact(rng: Random, name: str, template: tuple[str, str]) -> Fact:
    given = {"n": name} | {key: _MAKERS[key](rng) for key in _SHARED}
    question, sentence = (text.format_map(_Drawn(rng, given)) for text in template)
    return Fact(question, sentence)


def subject(rng: Random) -> FactSubject:
    """Invent a subject with two to four facts in random order."""
    naming, *lines = rng.choice(_SUBJECTS.strip().split("\n\n")).split("\n")
    templates = [tuple(line.split(" | ")) for line in lines]
    name = naming.format_map(_Drawn(rng, {}))
    chosen = rng.sample(templates, rng.randint(2, 4))
    return FactSubject(name, tuple(_fact(rng, name, template) for template in chosen))


def needle(rng: Random) -> Fact:
    """Invent a lone fact to be hidden in a long text."""
    return _fact(rng, words.thing(rng), rng.choice(_NEEDLES))
