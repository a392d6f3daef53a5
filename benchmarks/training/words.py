"""Names and words for the synthetic tasks: short lists, and syllables for names that occur nowhere else.

A small model cannot learn invented names by heart; it can only copy them.
"""

from __future__ import annotations

from random import Random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _split(
    """amber ancient azure bitter black blue bold brass bright broken bronze calm clever cobalt copper coral crimson
    crystal curious dark deep distant double dusty early eastern electric empty fallen fast fifth final first flying
    foreign forgotten fourth free frozen gentle giant gilded golden grand granite gray great green hidden high
    hollow honest humble hungry inner iron ivory jade lantern last lesser little lonely long lost loud lower lucky
    marble midnight modern mossy narrow new noble northern old open outer painted pale paper patient pearl plain
    polar proud purple quick quiet rapid red restless rising round royal ruby rusty salt sapphire scarlet second
    secret seventh sharp shining silent silver simple sixth sleeping slow small smooth solar southern speckled
    spring steady steel still stone strange striped summer sunken swift tall third tidal tiny twin upper velvet
    violet wandering warm western white wide wild winter wooden yellow young"""
)
NOUNS = _split(
    """acorn anchor anvil apple arch arrow badger barrel basket beacon bear bell bench birch bird boat bottle branch
    bridge bucket button cabin camel candle canyon castle cedar chain chapel clock cloud comet compass cradle crane
    crow crown curtain daisy deer desk dolphin door dragon drum eagle echo elm ember engine falcon feather fern
    ferry fiddle field finch flag flame flute forest fountain fox garden gate glacier glove goat goose hammer harbor
    hare harp hawk heron hill horn horse island ivy jacket jar kettle key kite ladder lake lamp lantern lark leaf
    lemon lily lion locket loom maple mask meadow mill mirror mitten moon moth mountain needle nest oak oar orchard
    otter owl paddle parrot pebble pen pepper pigeon pillow pine plough plum pond poppy quill rabbit raven reed
    ribbon ring river robin rocket root rope rose saddle sail salmon scarf shell shield ship shore spade sparrow
    spider spoon squirrel star stone stork stove stream swan table teapot thistle thorn tiger torch tower trumpet
    tulip tunnel turtle umbrella valley vase violin wagon walnut wave whale wheel whistle willow window wolf wren"""
)
FIRST_NAMES = _split(
    """Ada Agnes Alan Albert Alice Amara Amos Ana Anders Anika Arthur Astrid Beatrix Bela Boris Bruno Carla Cecil Chen
    Clara Colin Cora Dario David Dora Edgar Edith Elena Elias Emil Esther Eva Farid Felix Fiona Flora Frida George
    Grace Greta Gustav Hana Harold Hazel Hector Helen Henrik Hugo Ibrahim Ida Igor Ines Ingrid Irene Isaac Ivan Jack
    Jada James Jane Jonas Josef Julia Kamal Karin Kenji Klara Lars Laura Lena Leo Lila Linus Louis Lucia Magnus
    Maria Marta Max Mei Mila Mina Moses Nadia Naomi Nils Nina Nora Olga Omar Oscar Otto Paula Pedro Peter Petra
    Priya Quentin Rachel Ravi Rita Robert Rosa Ruth Samuel Sara Selma Sergei Simon Sofia Stefan Susan Tara Teresa
    Theo Thomas Tilda Tomas Uma Ursula Vera Victor Vikram Walter Wanda Xavier Yara Yusuf Zara Zoe"""
)
MONTHS = _split("January February March April May June July August September October November December")
COLOURS = _split("black white red green blue yellow orange purple brown pink gray silver gold teal maroon")
MATERIALS = _split("granite brick oak marble iron limestone steel sandstone glass slate copper clay pine bronze")
GOODS = _split(
    """wool coal tea timber salt grain honey silk paper copper cheese leather olives fish maps clocks lamps rope books
    seeds pottery glass spices cotton tools paint flour coffee"""
)
ONSETS = _split("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sk st t th tr v w y z")
VOWELS = _split("a e i o u ae ai ea ei ia oa ou")
CODAS = _split("b ck d ft g l ld ll m mp n nd ng nt r rd rk rn s sk ss st t th x z")
ENDINGS = _split("ton ville field ford burg mouth wick stead haven ham by holm bridge dale well port")


def invent(rng: Random) -> str:
    """Return a pronounceable invented name of one to three syllables, such as 'Kelvar'."""
    syllables = rng.choices((1, 2, 3), (1, 5, 3))[0]
    body = "".join(rng.choice(ONSETS) + rng.choice(VOWELS[:5] * 3 + VOWELS[5:]) for _ in range(syllables))
    return (body + rng.choice(CODAS)).capitalize()


def person(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {invent(rng)}"


def place(rng: Random) -> str:
    return invent(rng) + (rng.choice(ENDINGS) if rng.random() < 0.5 else "")


def thing(rng: Random) -> str:
    """Return a name such as 'Blue Lantern'."""
    return f"{rng.choice(ADJECTIVES).capitalize()} {rng.choice(NOUNS).capitalize()}"


def date(rng: Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1700, 2030)}"


def code(rng: Random) -> str:
    if rng.random() < 0.7:
        return str(rng.randint(10**3, 10 ** rng.randint(4, 6) - 1))
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}-{rng.randint(100, 99999)}"


def word(rng: Random) -> str:
    return rng.choice(NOUNS)


def number(rng: Random) -> str:
    """Return a whole number below a million; small ones are more frequent."""
    return str(int(10 ** rng.uniform(0.0, 6.0)))
