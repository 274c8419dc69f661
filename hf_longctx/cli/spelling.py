"""Accept every option with hyphens and with underscores, and suggest an option for a misspelled one."""

import difflib
from collections.abc import Iterable, Sequence


def respell(words: Sequence[str], options: Iterable[str]) -> list[str]:
    """Replace each option by the spelling that the parser knows.

    Only option names change: not values, words after `--`, or names of options that the parser does not know.

    >>> respell(["--max_length", "3", "--text=a_b", "--model_args"], ["--max-length", "--text"])
    ['--max-length', '3', '--text=a_b', '--model_args']
    """
    known = {option.replace("_", "-"): option for option in options}
    end = words.index("--") if "--" in words else len(words)
    respelled = []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        hyphens = name.replace("_", "-")
        if any(option.startswith(hyphens) for option in known):  # argparse accepts the beginning of an option
            name = known.get(hyphens, hyphens)
        respelled.append(name + equals + value if word.startswith("--") else word)
    return [*respelled, *words[end:]]


def suggestion(words: Iterable[str], options: Iterable[str]) -> str:
    """Return "Did you mean ...?" for the first unknown option in `words`. If no option is similar, return "".

    >>> suggestion(["x", "--max-lenght=3"], ["--max-length", "--text"])
    ' Did you mean --max-length?'
    """
    options = [*options]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options:
            close = difflib.get_close_matches(name, options, 1)
            return f" Did you mean {close[0]}?" if close else ""
    return ""
