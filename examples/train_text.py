"""The text that examples/train.py learns: short tales by a small grammar, the same in every run.

    python -m examples.train_text | head -30

Each tale is about a few people of a town, who go somewhere, look for something, ask others and come
home with it or without. What is told once holds to the end of a tale: names, places, who has what.
So there is something to learn at every distance: letters of a word, words of a sentence, and the
name that was given sentences ago. It is ours, and as free as the rest of this project.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

NUM_BYTES = 48_000
PEOPLE = (
    "Ada", "Bruno", "Clara", "David", "Edith", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara",
    "Leo", "Marta", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tilda", "Viktor",
)  # fmt: skip
WORK = (
    "baker", "carpenter", "clockmaker", "ferryman", "gardener", "glazier", "miller", "nurse",
    "potter", "printer", "shepherd", "smith", "tailor", "teacher",
)  # fmt: skip
PLACES = (
    "the bridge", "the harbour", "the library", "the lighthouse", "the market", "the mill",
    "the old tower", "the orchard", "the quarry", "the station", "the town hall", "the vineyard",
)  # fmt: skip
THINGS = (
    "brass key", "blue lantern", "broken compass", "copper bell", "folded letter", "glass bottle",
    "green umbrella", "grey notebook", "heavy hammer", "painted box", "red scarf", "silver ring",
    "small ladder", "wooden flute", "woollen coat", "yellow map",
)  # fmt: skip
WEATHER = (
    "It rained", "It snowed", "The sun shone", "A cold wind blew", "Fog lay over the town",
    "The air was warm", "Clouds hung low",
)  # fmt: skip
TIMES = ("in the morning", "at noon", "in the afternoon", "towards evening", "before sunrise")
ROADS = (
    "along the river", "across the fields", "through the narrow streets", "over the hill",
    "past the empty houses", "by the north road",
)  # fmt: skip
MANNERS = ("slowly", "quickly", "in silence", "with a lamp in hand", "singing", "out of breath")
NUMBERS = ("two", "three", "four", "five", "six", "seven")


class Tale:
    """One tale, told by choices of one generator."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self.hero, self.friend, self.owner = choose.sample(PEOPLE, 3)
        self.hero_work, self.friend_work = choose.sample(WORK, 2)
        self.thing, self.other_thing = choose.sample(THINGS, 2)
        self.home, self.first, self.second = choose.sample(PLACES, 3)

    def text(self) -> str:
        parts = [self._begin(), self._loss(), self._search(), self._question()]
        parts += [self._aside() for _ in range(self._choose.randint(0, 2))]
        parts.append(self._end())
        return " ".join(parts) + "\n\n"

    def _one(self, words: Sequence[str]) -> str:
        return self._choose.choice(words)

    def _begin(self) -> str:
        return self._one((
            f"{self.hero} was a {self.hero_work} and lived near {self.home}.",
            f"Near {self.home} lived {self.hero}, who was a {self.hero_work}.",
            f"There once was a {self.hero_work} near {self.home}, whose name was {self.hero}.",
        ))  # fmt: skip

    def _loss(self) -> str:
        days = self._one(NUMBERS)
        return self._one((
            f"{self._weather()} when {self.hero} saw that the {self.thing} was gone.",
            f"For {days} days {self.hero} had not seen the {self.thing}.",
            f"{self._weather()}. {self.owner} came and asked {self.hero} for the {self.thing}, but "
            f"nobody knew where the {self.thing} was.",
        ))  # fmt: skip

    def _search(self) -> str:
        return (
            f"So {self.hero} went {self._one(ROADS)} to {self.first}, {self._one(MANNERS)}, and "
            f"looked for the {self.thing}. " + self._one((
                f"At {self.first} there was only a {self.other_thing}.",
                f"But nothing was at {self.first} except a {self.other_thing}.",
                f"At {self.first} somebody had left a {self.other_thing}, and {self.hero} took it.",
            ))
        )  # fmt: skip

    def _question(self) -> str:
        answer = self._one((
            f"I saw it at {self.second} {self._one(TIMES)}",
            f"Go to {self.second} and ask for {self.owner}",
            f"{self.owner} took it to {self.second}",
        ))  # fmt: skip
        return (
            f'There {self.hero} met {self.friend}, the {self.friend_work}. "Where is the '
            f'{self.thing}?" asked {self.hero}. "{answer}," said {self.friend}.'
        )

    def _aside(self) -> str:
        return self._one((
            f"{self._weather()} {self._one(TIMES)}.",
            f"{self.friend} went with {self.hero} {self._one(ROADS)}.",
            f"They rested for {self._one(NUMBERS)} hours and spoke of {self.home}.",
            f"{self.hero} thought of {self.owner} and walked on {self._one(MANNERS)}.",
        ))  # fmt: skip

    def _end(self) -> str:
        return f"At {self.second} " + self._one((
            f"{self.hero} found the {self.thing} and brought it home to {self.home}.",
            f"{self.owner} had the {self.thing} and gave it back to {self.hero}.",
            f"{self.owner} gave {self.hero} the {self.thing} for the {self.other_thing}.",
            f"they looked until night, but the {self.thing} was never found.",
        ))  # fmt: skip

    def _weather(self) -> str:
        return self._one(WEATHER)


def tales(num_bytes: int = NUM_BYTES) -> bytes:
    """So many bytes of ASCII.

    >>> tales(60)
    b'There once was a gardener near the market, whose name was Ma'
    """
    choose = random.Random(0)
    told: list[str] = []
    length = 0
    while length < num_bytes:
        told.append(Tale(choose).text())
        length += len(told[-1])
    return "".join(told).encode("ascii")[:num_bytes]


if __name__ == "__main__":
    sys.stdout.write(tales().decode("ascii"))
