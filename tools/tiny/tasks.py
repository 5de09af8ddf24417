"""Synthetic tasks with checkable answers, on which clover-tiny is trained and evaluated.

Every prompt belongs to one of two splits by its hash, so that an evaluation prompt, whatever its seed,
was never trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
CITIES = (
    "Rome Oslo Lima Cairo Delhi Tokyo Quito Accra Milan Kyoto Dublin Berlin Madrid Vienna Prague Lisbon "
    "Athens Warsaw Helsinki Nairobi Toronto Chicago Havana Seoul Hanoi Perth Lyon Porto"
).split()
NAMES = "Anna Ben Carla David Emma Felix Grace Hugo Ines Jonas Kira Leo Mia Nora Omar Paula Quinn Rosa Sam Tara".split()
ROOMS = "kitchen bedroom bathroom office garage hallway cellar attic garden".split()
DEVICES = "lamp heater fan radio television oven boiler".split()
ITEMS = "apples eggs lemons onions carrots tomatoes bananas pencils candles batteries napkins potatoes".split()
CURRENCIES = "EUR USD GBP JPY CHF SEK PLN INR".split()
WORD = re.compile("[ _]?[A-Za-z]+")
MESSAGES = ("see you soon", "I am late", "dinner is ready", "call me back", "thank you", "where are you", "happy birthday")


@dataclass(frozen=True)
class Example:
    """One prompt and the only answer that counts as right; `thinking` is None without a thinking part."""

    task: str
    prompt: str
    answer: str
    thinking: str | None = None


def tool_call(name: str, **arguments: object) -> str:
    """A call in the Qwen format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _timer(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(1, 120)
    text = rng.choice(("Set a timer for {} minutes.", "Start a timer of {} minutes.", "Wake me in {} minutes."))
    return text.format(n), tool_call("set_timer", minutes=n)


def _weather(rng: random.Random) -> tuple[str, str]:
    city, day = rng.choice(CITIES), rng.choice(("today", "tomorrow", "on Monday", "on Friday", "on Sunday"))
    text = rng.choice(("What is the weather in {} {}?", "How warm is it in {} {}?", "Will it rain in {} {}?"))
    return text.format(city, day), tool_call("get_weather", city=city, day=day.removeprefix("on "))


def _message(rng: random.Random) -> tuple[str, str]:
    name, message = rng.choice(NAMES), rng.choice(MESSAGES)
    text = rng.choice(("Tell {}: {}.", "Write to {}: {}.", "Send {} a message: {}."))
    return text.format(name, message), tool_call("send_message", to=name, text=message)


def _switch(rng: random.Random) -> tuple[str, str]:
    device, room, state = rng.choice(DEVICES), rng.choice(ROOMS), rng.choice(("on", "off"))
    text = rng.choice(("Turn {1} the {0} in the {2}.", "Switch {1} the {2} {0}."))
    return text.format(device, state, room), tool_call("switch", device=device, room=room, state=state)


def _shopping(rng: random.Random) -> tuple[str, str]:
    count, item = rng.randint(2, 40), rng.choice(ITEMS)
    text = rng.choice(("Add {} {} to my list.", "We need {} {}.", "Put {} {} on the list."))
    return text.format(count, item), tool_call("add_item", item=item, count=count)


def _convert(rng: random.Random) -> tuple[str, str]:
    amount = rng.randint(1, 99)
    source, target = rng.sample(CURRENCIES, 2)
    text = rng.choice(("Convert {} {} to {}.", "How much is {} {} in {}?"))
    return text.format(amount, source, target), tool_call("convert", amount=amount, source=source, target=target)


def _tool(rng: random.Random, thinking: bool) -> Example:
    make = rng.choice((_timer, _weather, _message, _switch, _shopping, _convert))
    prompt, answer = make(rng)
    return Example("tool", prompt, answer)


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(shortest, longest)))


def _reverse(rng: random.Random, thinking: bool) -> Example:
    word = _word(rng, 3, 6)
    prompt = rng.choice(('Reverse "{}".', 'Write "{}" backwards.')).format(word)
    return Example("reverse", prompt, word[::-1], " ".join(word) if thinking else None)


def _sort(rng: random.Random, thinking: bool) -> Example:
    word = _word(rng, 3, 5)
    prompt = rng.choice(('Sort the letters of "{}".', 'Put the letters of "{}" in order.')).format(word)
    return Example("sort", prompt, "".join(sorted(word)), " ".join(word) if thinking else None)


def _count(rng: random.Random, thinking: bool) -> Example:
    word = "".join(rng.choice(VOWELS if rng.random() < 0.4 else LETTERS) for _ in range(rng.randint(3, 5)))
    prompt = rng.choice(('How many vowels are in "{}"?', 'Count the vowels in "{}".')).format(word)
    marks = ["1" if each in VOWELS else "0" for each in word]
    return Example("count", prompt, str(marks.count("1")), " ".join(marks) if thinking else None)


def _upper(rng: random.Random, thinking: bool) -> Example:
    word = _word(rng, 3, 8)
    prompt = rng.choice(('Write "{}" in capitals.', 'Make "{}" upper case.')).format(word)
    return Example("upper", prompt, word.upper())


def _sum_steps(a: int, b: int) -> str:
    """Column addition, units first."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{a % 10}+{b % 10}={units}; {a // 10}+{b // 10}+{units // 10}={tens}"


def _add(rng: random.Random, thinking: bool) -> Example:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    prompt = rng.choice(("What is {} + {}?", "Add {} and {}.")).format(a, b)
    return Example("add", prompt, str(a + b), _sum_steps(a, b) if thinking else None)


def _subtract(rng: random.Random, thinking: bool) -> Example:
    a, b = sorted((rng.randint(0, 15), rng.randint(0, 15)), reverse=True)
    prompt = rng.choice(("What is {} - {}?", "Take {1} from {0}.")).format(a, b)
    return Example("subtract", prompt, str(a - b))


TASKS: dict[str, tuple[float, Callable[[random.Random, bool], Example]]] = {
    "tool": (3.5, _tool),
    "reverse": (1.2, _reverse),
    "sort": (1.5, _sort),
    "count": (1.0, _count),
    "upper": (0.6, _upper),
    "add": (1.2, _add),
    "subtract": (1.2, _subtract),
}


def split_of(prompt: str) -> Split:
    """A tenth of all prompts, chosen by hash, is held out."""
    return "held_out" if hashlib.sha256(prompt.encode()).digest()[0] < 26 else "train"


def examples(seed: int | str, split: Split) -> Iterator[Example]:
    """An endless, reproducible stream of examples of one split."""
    rng = random.Random(str(seed))
    names, weights = list(TASKS), [weight for weight, _ in TASKS.values()]
    while True:
        name = rng.choices(names, weights)[0]
        example = TASKS[name][1](rng, rng.random() < 0.3)
        if split_of(example.prompt) == split:
            yield example


def spoken_words() -> list[str]:
    """Words of the prompts and of the tool calls, with the space or underscore before them where they have one; quoted
    words of the letter tasks are not among them."""
    rng = random.Random("words")
    words: set[str] = set()
    for _ in range(40_000):  # enough that none is missed
        task, (_, make) = rng.choice(list(TASKS.items()))
        example = make(rng, False)
        parts = example.prompt.split('"')[::2] + ([example.answer] if task == "tool" else [])
        words |= {word for part in parts for word in WORD.findall(part)}
    return sorted(words)
