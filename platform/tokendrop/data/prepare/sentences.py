"""Text to sentences, by a rule that knows no language."""

import re
from itertools import pairwise

_END = re.compile(
    r"""
    \n\s*                           # a line break
    | (?: \.(?<!(?<!['’])\b\w\.)   # not after an initial, an enumeration or the like: J. e.g. U.S. 1.
          (?<!\bMr\.)(?<!\bMs\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)
      | [!?…] )
      ["'”’»)\]]*\s+                # closing quotes and brackets, and a space
      (?![a-zß-öø-ÿ\s])             # before anything but a small letter
    | [。！？]["”’」』）]*\s*
    """,  # noqa: RUF001
    re.VERBOSE,
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, which are the text when joined.

    A sentence ends with its line, after `.`, `!`, `?` or `…` before a space where no small letter follows, and after
    Chinese or Japanese full stops. Single letters, single digits and the commonest titles before a `.` end none.
    """
    cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts) if stop > start]
