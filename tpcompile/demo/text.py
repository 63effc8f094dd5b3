"""The training text of the demo model: stories of a village, generated from a small grammar.

The facts about a person never change, so a model can memorize them. The events of a day are drawn
at random and repeated later in the story, so a model must look back for them. Each person has a
favourite in every list of choices, so the most likely word is always clear.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Person(NamedTuple):
    """A person of the village, with the facts that never change."""

    name: str
    trade: str
    home: str
    animal: str
    pet: str
    goods: str
    woman: bool

    @property
    def her(self) -> str:
        return "her" if self.woman else "him"


PEOPLE = tuple(
    Person(*row)
    for row in (
        ("Anna", "baker", "in the old mill", "grey cat", "Pepper", "warm bread", True),
        ("Boris", "farmer", "at the end of the valley", "brown cow", "Daisy", "fresh milk", False),
        ("Clara", "teacher", "next to the school", "small parrot", "Echo", "picture book", True),
        ("David", "fisherman", "by the harbour", "clever otter", "Splash", "smoked fish", False),
        ("Emma", "gardener", "behind the church", "slow tortoise", "Pebble", "ripe pears", True),
        ("Felix", "clockmaker", "under the tower", "quiet owl", "Midnight", "silver watch", False),
        ("Grace", "doctor", "across the bridge", "kind dog", "Biscuit", "herbal tea", True),
        ("Henry", "blacksmith", "near the gate", "strong horse", "Thunder", "iron kettle", False),
        ("Irene", "painter", "on the hill", "white goose", "Feather", "little painting", True),
        ("Jacob", "carpenter", "beside the forest", "red squirrel", "Hazel", "oak stool", False),
        ("Katja", "weaver", "in the narrow lane", "woolly lamb", "Button", "soft blanket", True),
        ("Louis", "miller", "along the river", "lazy donkey", "Barley", "oat cake", False),
        ("Maria", "beekeeper", "in the meadow", "round hedgehog", "Thistle", "sweet honey", True),
        ("Niels", "sailor", "inside the lighthouse", "loud gull", "Captain", "sea shells", False),
        ("Olga", "tailor", "above the market", "striped kitten", "Ribbon", "winter coat", True),
        ("Peter", "shepherd", "beyond the mountain", "old goat", "Clover", "goat cheese", False),
        ("Rosa", "cook", "opposite the fountain", "plump hen", "Saffron", "onion soup", True),
    )
)

_WEATHER = {
    "rainy": "took a large umbrella",
    "sunny": "wore a straw hat",
    "windy": "tied a scarf around the neck",
    "snowy": "put on thick boots",
}
_PLACES = {
    "the market": "bought six apples from a merchant",
    "the lake": "watched the swans on the water",
    "the forest": "picked a basket of mushrooms",
    "the station": "waited for the train from the city",
    "the castle": "climbed up to the highest window",
}
_COLOURS = ("blue", "green", "yellow", "purple", "golden", "turquoise")
_THINGS = ("lantern", "key", "purse", "drum", "kite", "ring", "bottle")
_FEELINGS = {"lantern": "glad", "key": "relieved", "purse": "thankful", "drum": "proud"}

_NEXT = 5
"""Distance in PEOPLE from a person to the friend, so each is the friend of exactly one other."""


@dataclass(frozen=True)
class _Day:
    """The random choices of one story, drawn in the order in which the story uses them."""

    weather: str
    place: str
    colour: str
    thing: str


def friend_of(index: int) -> int:
    """Return the index of a person's only friend, the hero of the next story."""
    return (index + _NEXT) % len(PEOPLE)


def all_sentences() -> list[str]:
    """Return every sentence that a story can contain, without repeats."""
    days = [
        _Day(weather, place, colour, thing)
        for weather in _WEATHER
        for place in _PLACES
        for colour in _COLOURS
        for thing in _THINGS
    ]
    return list(dict.fromkeys(s for i in range(len(PEOPLE)) for d in days for s in _story(i, d)))


def documents(seed: int) -> Iterator[list[str]]:
    """Yield documents endlessly, each two stories as a list of sentences."""
    draw = random.Random(seed)
    hero = draw.randrange(len(PEOPLE))
    while True:
        friend = friend_of(hero)
        yield [*_story(hero, _day(hero, draw)), *_story(friend, _day(friend, draw))]
        # mostly the friend's friend, so the most likely name is clear even across documents
        hero = friend_of(friend) if draw.random() < 0.7 else draw.randrange(len(PEOPLE))


def _day(index: int, draw: random.Random) -> _Day:
    return _Day(
        _likely(list(_WEATHER), index, draw),
        _likely(list(_PLACES), index, draw),
        _likely(_COLOURS, index, draw),
        _likely(_THINGS, index, draw),
    )


def _likely(choices: Sequence[str], index: int, draw: random.Random) -> str:
    """Draw a choice. The person's favourite is at least seven times as likely as any other."""
    favourite = choices[index // 2 % len(choices)]  # women and men alternate, and share favourites
    return favourite if draw.random() < 0.6 else draw.choice(choices)


def _story(index: int, day: _Day) -> list[str]:
    hero, friend = PEOPLE[index], PEOPLE[friend_of(index)]
    feeling = _FEELINGS.get(day.thing, "happy")
    return [
        f"{hero.name} is a {hero.trade} who lives {hero.home}.",
        f"The {hero.animal} of {hero.name} is called {hero.pet}.",
        f"One {day.weather} morning {hero.name} went to {day.place}.",
        f"Because it was {day.weather}, {hero.name} {_WEATHER[day.weather]}.",
        f"At {day.place} {hero.name} {_PLACES[day.place]}.",
        f"On the way home {hero.name} found a {day.colour} {day.thing}.",
        f"The {day.colour} {day.thing} belonged to {friend.name}, the {friend.trade}.",
        f"{friend.name} was {feeling} to have the {day.thing} back.",
        f"So {friend.name} thanked {hero.name} and gave {hero.her} the {friend.goods}.",
        f"In the evening {hero.name} showed {hero.pet} the {friend.goods}.",
        f"The next day {hero.name} told the story to {friend.name}.",
    ]
