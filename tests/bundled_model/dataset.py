"""A synthetic dataset in HellaSwag's JSON Lines format, with the answers far from the end of the context.

A list has four people and what each of them takes. Some unrelated sentences follow, then the list is repeated for one
of the four. All endings are on the list, so text near the question does not help: a model that sees only the last 23
tokens answers one item in four. A truncated context is therefore detected.

Rebuild the committed file with `python -m bundled_model.dataset OUT`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ITEMS = 480
"""The items of the committed file: divisible by 4, so that every label is right equally often."""

EVALUATION_SEED = 20_260_116
"""The seed of the committed file. With it the longest, the shortest and the first-named ending are each right for 25 %
of the items, within a percent. With 480 items most seeds deviate by two or three percent; with 20,000 items none does.
"""

_MIN_WORDS_SINCE_FACTS = 26
"""The minimum number of words between the last fact and the ending: more than 23 tokens with any tokenizer of words."""

_NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karin", "Leo",
    "Maria", "Nora", "Oscar", "Paula", "Robert", "Sofia", "Thomas", "Ursula", "Victor", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip

# Activity and its things. Within an activity their first words differ, and none is an article.
_THEMES = (
    ("Going to the market", (
        "bread", "honey", "olives", "sweet cherries", "goat cheese", "apple juice", "brown sugar", "mushrooms",
        "rice", "dried figs", "walnuts", "smoked salmon",
    )),
    ("Working in the garden", (
        "tulips", "red roses", "tomatoes", "white lilies", "pumpkins", "mint", "beans", "sunflowers",
        "young birches", "kale", "wild strawberries", "lavender",
    )),
    ("Taking an art class", (
        "boats", "horses", "snowy mountains", "old bridges", "cats", "fishermen", "clouds", "narrow streets",
        "owls", "lighthouses", "empty chairs", "dancers",
    )),
    ("Helping in the workshop", (
        "clocks", "bicycles", "radios", "leather boots", "lamps", "garden tools", "kites", "violins",
        "fishing nets", "umbrellas", "toys", "wooden crates",
    )),
)  # fmt: skip

_OPENINGS = (
    "Four friends met early in the {time} and shared the work:",
    "It was a {weather} {time}, and this is who took what:",
    "Four neighbours had a busy {time}, so they made a list:",
    "The group began on a {weather} {time} with a list:",
)

_FILLERS = (
    "The {time} was {weather} and the road was {state}.",
    "A {weather} wind came over the hill from the {side}.",
    "The bell of the church rang {count} times that {time}.",
    "There was {state} music on the other side of the square.",
    "Nobody was in a hurry, and the talk was {state}.",
    "A dog slept near the door for the whole {time}.",
    "The train from the {side} was late for {count} hours.",
    "They sat down for a while and told {count} long stories.",
    "The sky in the {side} was grey and the air was {weather}.",
    "Later the street was {state} and the shops were closed.",
    "Some children ran past and called out {count} times.",
    "The {weather} {time} went by and then it was time to go home.",
)

_QUESTIONS = (
    "When the {time} was over they read the list again: {name}",
    "Back at home they still knew who took what: {name}",
    "In the end it was just as they had planned: {name}",
    "Before they left, they checked the list once more: {name}",
)

_SLOTS = {
    "time": ("morning", "afternoon", "evening", "day"),
    "weather": ("warm", "cold", "windy", "mild", "damp", "bright"),
    "state": ("quiet", "loud", "slow", "calm", "strange"),
    "side": ("north", "south", "east", "west"),
    "count": ("two", "three", "five", "seven"),
}


class Fact(NamedTuple):
    """A person and what they take. The thing follows the name directly, which a tiny model learns in minutes."""

    name: str
    thing: str

    def __str__(self) -> str:
        """Return the fact as in the list."""
        return f"{self.name} {self.thing}"


class Item(NamedTuple):
    """One item: a record of the file, and its facts."""

    activity_label: str
    facts: tuple[Fact, ...]
    asked: Fact
    """The fact that the right ending repeats."""
    ctx: str
    endings: list[str]
    label: int
    """The index of the right ending."""

    @property
    def prompt(self) -> str:
        """The text that the endings continue after one space."""
        return f"{self.activity_label}: {self.ctx}"

    @property
    def substance(self) -> tuple[frozenset[Fact], Fact]:
        """The facts and the question, without the order of facts and endings and without the other sentences."""
        return frozenset(self.facts), self.asked


def _draw_item(rng: random.Random, label: int) -> Item:
    """Draw an item whose right ending is number `label`."""
    activity_label, things = rng.choice(_THEMES)
    people = zip(rng.sample(_NAMES, 4), rng.sample(things, 4), strict=True)
    facts = tuple(Fact(name, thing) for name, thing in people)
    # The question is about a random fact and the other endings are shuffled: only the facts determine the answer.
    asked = rng.choice(facts)
    endings = [f"{fact.thing}." for fact in facts if fact is not asked]
    rng.shuffle(endings)
    endings.insert(label, f"{asked.thing}.")
    since_facts = [_fill(rng, rng.choice(_QUESTIONS), name=asked.name)]
    fillers = rng.sample(_FILLERS, len(_FILLERS))
    while sum(len(sentence.split()) for sentence in since_facts) < _MIN_WORDS_SINCE_FACTS:
        since_facts.insert(0, _fill(rng, fillers.pop()))
    ctx = " ".join([_fill(rng, rng.choice(_OPENINGS)), ", ".join(map(str, facts)) + ".", *since_facts])
    return Item(activity_label, facts, asked, ctx, endings, label)


def _fill(rng: random.Random, template: str, **given: str) -> str:
    return template.format(**{slot: rng.choice(words) for slot, words in _SLOTS.items()}, **given)


def evaluation_items() -> list[Item]:
    """Return the items of the committed file, with each label right equally often."""
    rng = random.Random(EVALUATION_SEED)
    labels = [number % 4 for number in range(ITEMS)]
    rng.shuffle(labels)
    return [_draw_item(rng, label) for label in labels]


def training_items(seed: int) -> Iterator[Item]:
    """Yield items without end; even the evaluation's seed yields none with facts and question of an evaluation item."""
    held_out = {item.substance for item in evaluation_items()}
    rng = random.Random(seed)
    while True:
        item = _draw_item(rng, rng.randrange(4))
        if item.substance not in held_out:
            yield item


def to_json_lines(items: list[Item]) -> str:
    """Write items as HellaSwag's JSON Lines: the label is a string, `ind` counts from 0."""
    records = [
        {
            "ind": number,
            "activity_label": item.activity_label,
            "ctx": item.ctx,
            "endings": item.endings,
            "label": str(item.label),
        }
        for number, item in enumerate(items)
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bundled_model.dataset OUT.jsonl")
    Path(sys.argv[1]).write_text(to_json_lines(evaluation_items()), encoding="utf-8", newline="\n")
