"""Digests of the reference's character sets and mappings over all code points.

A digest is the start of a SHA-256 over lines: begin-end for each range of a set, or a code
point and the UTF-8 bytes of its result. Computing them takes minutes.
"""

import hashlib
import json

from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]

CATEGORIES = (
    "L Lu Ll Lt Lm Lo LC M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So"
    " Z Zs Zl Zp C Cc Cf Cn Co"
).split()
BINARY = (
    "Alphabetic Lowercase Uppercase White_Space Any Assigned Ideographic"
    " Unified_Ideograph Emoji Emoji_Presentation Emoji_Modifier Emoji_Modifier_Base"
    " Emoji_Component Extended_Pictographic Regional_Indicator Variation_Selector"
    " Join_Control Quotation_Mark Hex_Digit ASCII_Hex_Digit"
).split()
SCRIPTS = (
    "Han Hiragana Katakana Hangul Latin Greek Cyrillic Arabic Hebrew Thai Devanagari"
    " Common Inherited Unknown Bopomofo Myanmar Balinese Kawi Egyptian_Hieroglyphs"
).split()
POSIX = (
    "alnum alpha ascii blank cntrl digit graph lower print punct space upper xdigit"
    " word"
).split()


def digest(lines):
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def matches(pattern):
    """Returns the code points that `pattern`, a set of characters, matches."""
    text = "".join(map(chr, CODE_POINTS))
    rest = pre_tokenizers.Split(Regex(pattern + "+"), "removed")
    found = set(CODE_POINTS)
    for _, (begin, end) in rest.pre_tokenize_str(text):
        found.difference_update(CODE_POINTS[begin:end])
    return found


def set_digest(found):
    """Returns the digest of a set: its lines are ranges of code points."""
    lines = []
    begin = None
    for c in range(0x110001):
        if (c in found) == (begin is not None):
            continue
        if begin is None:
            begin = c
        else:
            lines.append(f"{begin:X}-{c - 1:X}\n")
            begin = None
    return digest(lines)


def split_in(pre, before, after, pieces):
    """Returns the code points c for which `pre` cuts the text before + c + after into `pieces` pieces."""
    return {
        c
        for c in CODE_POINTS
        if len(pre.pre_tokenize_str(before + chr(c) + after)) == pieces
    }


def mapping_digest(normalizer, before="", after=""):
    """Returns the digest of a normalizer: its lines are the code points that change, with their results."""
    lines = []
    for c in CODE_POINTS:
        text = before + chr(c) + after
        mapped = normalizer.normalize_str(text)
        if mapped != text:
            lines.append(f"{c:X} {mapped.encode().hex()}\n")
    return digest(lines)


def write(folder):
    whole = {
        "properties": {
            name: set_digest(matches(rf"\p{{{name}}}"))
            for name in CATEGORIES + BINARY + SCRIPTS + POSIX
        },
        "posix": {name: set_digest(matches(f"[[:{name}:]]")) for name in POSIX},
        "sets": {
            "punctuation": set_digest(
                split_in(pre_tokenizers.Punctuation("isolated"), "\x01", "\x01", 3)
            ),
            "numeric": set_digest(
                split_in(pre_tokenizers.Digits(individual_digits=True), "a", "a", 3)
            ),
            "space": set_digest(
                split_in(pre_tokenizers.WhitespaceSplit(), "a", "a", 2)
            ),
            "word": set_digest(split_in(pre_tokenizers.Whitespace(), "a", "a", 1)),
        },
        "mappings": {"lower": mapping_digest(normalizers.Lowercase())},
    }
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        normalizer = getattr(normalizers, form)()
        whole["mappings"][form] = mapping_digest(normalizer)
        # With marks on both sides, the digest also depends on the order into which marks are sorted.
        whole["mappings"][form + " among marks"] = mapping_digest(
            normalizer, "a\u0301", "\u0323"
        )
    (folder / "unicode.json").write_text(json.dumps(whole, indent=1) + "\n")
