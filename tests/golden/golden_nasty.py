"""Strings that are difficult for tokenizers, with the reference's ids for every type of tokenizer.

texts.json lists the strings. cases.json has for each type:
- name; base and change: the members that are replaced in byte.json or sentencepiece.json.
  Without base, name is a folder of ../.
- ids: those of each string, without special tokens.
- decoded: the texts that ids decode to, by index, if they differ from the strings; null if
  a text has a U+FFFD.
"""

import json
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# The strings are made of these pieces. Each occurs at least once.
PIECES = (
    "\n|\r|\r\n|\t|\x0b|\x0c|\x1c|\x85|\u00a0|\u1680|\u180e|\u2003|\u2028|\u2029"
    "|\u200b|\u200c|\u200d|\ufeff|\u3000|\x00|\x7f|\u00ad| |  |    "
    "|a|Z|the| The|hello| world|HTML|1|12|1234|\u0663|\u00bd|\u00b2|\u2167|\u4e09"
    "|\uff11|\U0001d7d8|'s|'LL|'\u017f|\u2019re|'|`|.|,|...|_|__|--|//|\\|#{|}}|<|[]"
    "|$|\u20ac|\u2581|\u2581\u2581|\u0120|\u00e9|e\u0301|\u0301|\u0323\u0301|\u0345"
    "|\u1e9b\u0323|\u212b|\ufb01|\u00df|\u1e9e|\u0130|\u0131|\u03a3\u03c2|\u01c5"
    "|\u02b0|\u0e33|\u0915\u094d\u0937\u093f|\u1100\u1161\u11a8|\ud55c|\u6cb3|\u3042"
    "|\uff76\uff9e|\u30fc|\u3005|\u3007|\u0639\u064e|\u05d0|\u0416|\U0001f642"
    "|\U0001f44d\U0001f3fd|\u2764\ufe0f|\U0001f469\u200d\U0001f469\u200d\U0001f467"
    "|\U0001f1eb\U0001f1f7|1\ufe0f\u20e3|\U0001f3f4\U000e0067\U000e007f|\U00010400"
    "|\ufffd|\ufffe|\ue000|\U0010ffff|\U00020000|\u3002|\uff0c|\u060c|\u2026|\u00bf"
    # Characters that at least one Unicode table of the reference does not have yet.
    "|\u32ff|\ua7f2|\u061d|\u2e52|\u166d|\U000111c9|\ua7cb|\U0002ebf0|\U00010d40"
    "|\U00010d50|\U00011de0|\U00016ea0"
    "|<0x41>|<0xFF>|<s>|</s>|<unk>|<|endoftext|>|<|im_start|>|<left>|<both>|word"
).split("|")


def pieces():
    # The separator "|" cuts special tokens such as "<|endoftext|>" into these pieces.
    names = {"<", "endoftext", ">", "im_start"}
    kept = [p for p in PIECES if p not in names]
    return kept + ["<", "<|endoftext|>", "<|im_start|>"]


def nasty_texts():
    rng = random.Random("nasty")
    parts = pieces()
    alone = ["".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    mixed = ["".join(rng.choices(parts, k=rng.randint(2, 9))) for _ in range(50)]
    runs = [p * 40 for p in (" ", "\n", "\r\n", "\u3000", "a", "1", "!", "\u0301")]
    return alone + mixed + runs


def split(pattern, behavior="Isolated", kind="Regex"):
    return {
        "type": "Split",
        "pattern": {kind: pattern},
        "behavior": behavior,
        "invert": False,
    }


def byte_level(use_regex=False, prefix=False):
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def metaspace(**fields):
    return {"type": "Metaspace", "replacement": "\u2581", **fields}


DIGITS = {"type": "Digits", "individual_digits": True}
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NO_WORD = r"[^\r\n\p{L}\p{N}]?"
O200K = (
    rf"{NO_WORD}{UPPER}*{LOWER}+{SHORT}?|{NO_WORD}{UPPER}+{LOWER}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"
)
TEKKEN = O200K.replace(SHORT + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
KIMI = r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
QWEN35 = (
    rf"{SHORT}|{NO_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{END}"
)
LLAMA3 = (
    rf"{SHORT}|{NO_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + END
)
PREPEND = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ],
}
UNDERLINES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
TO_SPACES = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
BYTES = [TO_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

# (name, base, normalizer, pre-tokenizer, decoder). None: the base's own component is used.
TYPES = [
    ("gpt2", "byte", None, byte_level(True), None),
    ("bloom", "byte", None, sequence(
        split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), byte_level()), None),
    ("llama3", "byte", None, sequence(split(LLAMA3), byte_level()), None),
    ("qwen2", "byte", {"type": "NFC"}, sequence(
        split(LLAMA3.replace("{1,3}", "")), byte_level()), None),
    ("qwen3.5", "byte", {"type": "NFC"}, sequence(
        split(QWEN35), byte_level()), None),
    ("smollm", "byte", None, sequence(DIGITS, byte_level(True)), None),
    ("cohere", "byte", {"type": "NFC"}, sequence(DIGITS, byte_level(True)), None),
    ("falcon", "byte", None, sequence(
        {"type": "Punctuation", "behavior": "Contiguous"}, byte_level(True),
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]")), None),
    ("deepseek-v3", "byte", None, sequence(
        split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3),
        byte_level()), None),
    ("cl100k", "byte", None, sequence(split(CL100K), byte_level()), None),
    ("o200k", "byte", None, sequence(split(O200K), byte_level()), None),
    ("tekken", "byte", None, sequence(split(TEKKEN), byte_level()), None),
    ("kimi", "byte", None, sequence(split(KIMI), byte_level()), None),
    ("llama2", "sentencepiece", PREPEND, None,
        {"type": "Sequence", "decoders": BYTES + [STRIP]}),
    ("mistral", "sentencepiece", None, metaspace(
        prepend_scheme="first", split=False),
        {"type": "Sequence", "decoders": BYTES + [STRIP]}),
    ("gemma", "sentencepiece", UNDERLINES, split(
        " ", "MergedWithPrevious", "String"), {"type": "Sequence", "decoders": BYTES}),
    ("metaspace-old", "sentencepiece", {"type": "NFKC"}, metaspace(
        add_prefix_space=True), metaspace(prepend_scheme="always", split=True)),
    ("chatglm", "sentencepiece", None, sequence(
        {"type": "WhitespaceSplit"}, metaspace(prepend_scheme="always", split=True)),
        {"type": "Sequence", "decoders": [
            {"type": "ByteFallback"},
            metaspace(prepend_scheme="always", split=True)]}),
]  # fmt: skip


def train(texts, pre_tokenizer, alphabet):
    """Returns a BPE tokenizer with merges across all boundaries, so that a wrong split changes ids."""
    tok = Tokenizer(models.BPE())
    if pre_tokenizer:
        tok.pre_tokenizer = pre_tokenizer
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + 260,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
        ),
    )
    return json.loads(tok.to_str())["model"]


def bases(texts):
    form = {"version": "1.0", "truncation": None, "padding": None}
    form |= {"normalizer": None, "pre_tokenizer": None, "post_processor": None}

    def added(model, contents):
        return [
            {
                "id": model["vocab"].setdefault(content, len(model["vocab"])),
                "content": content,
                "single_word": content == "word",
                "lstrip": content in ("<left>", "<both>"),
                "rstrip": content == "<both>",
                "normalized": not special,
                "special": special,
            }
            for content, special in contents
        ]

    names = [("<|endoftext|>", True), ("<|im_start|>", True), ("<left>", False)]
    names += [("<both>", False), ("word", False)]
    byte = train(
        texts,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokens = added(byte, names)
    yield "byte", form | {
        "added_tokens": tokens,
        "decoder": byte_level(True, True),
        "model": byte,
    }
    alphabet = sorted({c for t in texts for c in t if " " < c < "\u2582"} | {"\u2581"})
    pieces = train([t.replace(" ", "\u2581") for t in texts], None, alphabet)
    for piece in ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]:
        pieces["vocab"].setdefault(piece, len(pieces["vocab"]))
    pieces |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    names = [("<unk>", True), ("<s>", True), ("</s>", True)] + names[2:]
    tokens = sorted(added(pieces, names), key=lambda t: t["id"])
    yield "sentencepiece", form | {
        "added_tokens": tokens,
        "decoder": None,
        "model": pieces,
    }


def lines(rows):
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f"[\n{body}\n]"


def cases(tok, texts):
    """Returns the ids of each text, and the decoded texts that differ from the originals."""
    ids = [tok.encode(text, add_special_tokens=False).ids for text in texts]
    decoded = {
        # None: Kvasir decodes byte runs that are only partly valid UTF-8 in another way than the reference.
        str(i): got if "\ufffd" not in got else None
        for i, text in enumerate(texts)
        if (got := tok.decode(ids[i], skip_special_tokens=False)) != text
    }
    return {"ids": ids, "decoded": decoded}


def write(folder, golden):
    """`golden`: names and tokenizers of the other folders."""
    folder.mkdir()
    texts = nasty_texts()
    (folder / "texts.json").write_text(lines(texts) + "\n")
    files = dict(bases(texts))
    for name, form in files.items():
        text = json.dumps(form, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json").write_text(text + "\n")
    rows = []
    for name, base, normalizer, pre_tokenizer, decoder in TYPES:
        change = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
        if decoder:
            change["decoder"] = decoder
        tok = Tokenizer.from_str(json.dumps(files[base] | change))
        rows.append({"name": name, "base": base, "change": change} | cases(tok, texts))
    for name, tok in golden:
        rows.append({"name": name} | cases(tok, texts))
    (folder / "cases.json").write_text(lines(rows) + "\n")
