"""Tiny trained tokenizers of every supported shape with encode/decode cases."""

import json
import random
import shutil

import golden_nasty
import golden_unicode
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
UNDERLINE = "\u2581"

CORPUS = [
    "The miller's daughter walked down to the river every morning, and she'd"
    " count the boats that were tied there.",
    "It was the 3rd of May 1847; the water stood 12 feet high, and they'll tell"
    " you 1234567 stories about it.",
    "\"Where are you going?\" said the ferryman. \"I'm going nowhere,\" she said,"
    " \"and I've been there before.\"",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX JUMPS OVER"
    " THE LAZY DOG.",
    "def walk(river):\n    for boat in river.boats:\n\tprint(boat, 0.25)\n"
    "    return [1, 22, 333]\n",
    "Der Fluß ist größer als früher; où êtes-vous allé, señor? Příliš žluťoučký"
    " kůň úpěl ďábelské ódy.",
    "Он сказал, что река стала шире, и лодки больше не нужны.",
    "河水很高，船夫说今天不能过河。今天不能过河。 川の水は高い。",
    "قال إن النهر أصبح أوسع والقوارب لم تعد ضرورية",
    "नदी चौड़ी हो गई है। 강물이 높다. 🙂🙂 👍 ❤️",
]

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "The miller's daughter walked down to the river.",
    "I'm sure they'll say we've done it, she'd said; it's DON'T 'S 'Re 'LL.",
    "'\u017f and ''s ' s",
    "tabs\tand\t\ttabs",
    "line\nline\n\nline\n\n\n",
    "windows\r\nlines\r\n\r\nend\r",
    " \n  \n\t \r\n ",
    "mixed \t\n\x0b\x0c\x85\u00a0\u2003\u2028\u3000space",
    "zero\u200bwidth\u200djoin\ufeffbom",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000",
    "\u0663\u0664\u0665 \u00bd \u2167 \u4e00\u4e8c\u4e09 \uff11\uff12\uff13",
    "Der Fluß ist größer; où êtes-vous, señor? ÆØÅ æøå İıŞş",
    "Он сказал, что река стала шире.",
    "河水很高，船夫说今天不能过河。",
    "川の水は高い。カタカナ ﾊﾝｶｸ",
    "강물이 높다 \u1100\u1161\u11a8",
    "قال إن النهر أصبح أوسع",
    "שלום עולם",
    "नदी चौड़ी हो गई है।",
    "ภาษาไทยไม่มีช่องว่าง",
    "e\u0301 \u00e9 a\u0308\u0323 \u1e69 s\u0323\u0307 \u212b \u2126 \ufb01 \u1e9b\u0323",
    "Z\u0351\u036b\u0343a\u0329\u0313lgo\u0317\u032f",
    "🙂 🙂🙂 👍🏽 ❤️",
    "👩‍👩‍👧‍👦 👩🏾‍🚀 🏳️‍🌈",
    "🇫🇷🇩🇪🇯🇵 1️⃣",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "\x00",
    "nul\x00inside \x01\x02\x1b[0m \x7f",
    "\ufffd replacement \ufffd\ufffd",
    "a" * 300,
    "abcdefghij" * 20,
    "!?!?!?...,,,;;;---___===+++***&&&^^^%%%$$$###@@@~~~```|||\\\\\\///",
    "\"quoted\" (paren) [bracket] {brace} <angle> </angle>",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org",
    "def walk(river):\n    for boat in river:\n\tprint(boat)\n",
    "x" + " " * 20 + "y" + "\n" * 7 + "z",
    "\u2581 already\u2581underlined \u2581\u2581",
    "▁",
    "<0x41> <0x0A> <0xZZ>",
    "Ġ Ċ ĠHello",
    "nowhereland nowhere",
    "<s>", "</s>", "<s>hello</s>", "<s> hello </s>", "a<s>b <unk>c",
    "<|endoftext|>", "hi<|endoftext|>there <|endoftext|> x",
    "<|begin_of_text|>x<|eot_id|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|<|im_start|>", "<|end", "<|endoftext|><|endoftext|>",
    "left  <left>right", "<left>", " \n <left> x", "a<left><left>b",
    "left<right>  right", "<right>\n\n", "x <right> <left> y",
    "word wordy aword word. word_word -word- wordword 1word word",
    "both   <both>   sides<both>",
    "plain <plain> text<plain>", "PLAIN <Plain>", "e\u0301tude \u00e9tude",
]

# Texts only for the pipeline variants. They are short and have every kind of boundary between words.
PIPELINE_TEXTS = [
    "",
    "the river, the boats",
    "  the   river  ",
    "she said: 12 boats, 345!!",
    "a1b22c333 4",
    "the-river--the...river",
    "line\nline\r\n\r\nthe\tend",
    "Th\u00e9 R\u00edver \u00c9tude \u0130stanbul STRASSE \u1e9e \u03a3\u03c2",
    "e\u0301 \ufb01 \u212b \uff41\uff11 \u2460 \u1100\u1161 \uac00 \u0344",
    "abab ab aab bab",
    "\u00a0the\u2003river\u3000",
    "the_river$and+the=boats\u20ac\u2014\u3002\u00bf",
    "  ", "ab", ",", "1",
]


def rank_specials(names):
    return [AddedToken(n, special=True, normalized=False) for n in names]


def trained_byte_level(size, pre, specials, normalizer=None):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre
    if normalizer:
        tok.normalizer = normalizer
    tok.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=1,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=rank_specials(specials),
        ),
    )
    return tok


def gpt2():
    """GPT-2: a ByteLevel pre-tokenizer that splits by its own regex, and added tokens with every flag."""
    tok = trained_byte_level(
        420, pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"]
    )
    tok.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
            AddedToken("word", single_word=True, normalized=True),
            AddedToken("<plain>", normalized=True),
        ]
    )
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.decoder = decoders.ByteLevel()
    return json.loads(tok.to_str())


def gpt2_prefix_space():
    """A variant with add_prefix_space, merges as "a b" strings, and a template <s> … </s>."""
    tok = trained_byte_level(
        380, pre_tokenizers.ByteLevel(add_prefix_space=True), ["<s>", "</s>"]
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    tok.decoder = decoders.ByteLevel()
    form = json.loads(tok.to_str())
    form["model"]["merges"] = [" ".join(m) for m in form["model"]["merges"]]
    return form


def llama3():
    """Llama 3: a Split regex, ignore_merges, special tokens after the vocabulary, and bos."""
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok = trained_byte_level(500, pre, [])
    form = json.loads(tok.to_str())
    # No merges lead to this word, so only ignore_merges can produce it.
    form["model"]["vocab"]["nowhereland"] = len(form["model"]["vocab"])
    form["model"]["ignore_merges"] = True
    tok = Tokenizer.from_str(json.dumps(form))
    tok.add_special_tokens(
        rank_specials(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    )
    bos = tok.token_to_id("<|begin_of_text|>")
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", bos)],
            ),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return json.loads(tok.to_str())


def qwen2():
    """Qwen 2: NFC, a Split regex, and chat markers that add_special_tokens does not add."""
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok = trained_byte_level(460, pre, [], normalizers.NFC())
    tok.add_special_tokens(
        rank_specials(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    )
    # The token is written decomposed, so it is found only if token and text are both normalized.
    tok.add_tokens([AddedToken("e\u0301tude", normalized=True)])
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    form = json.loads(tok.to_str())
    form["model"]["merges"] = [" ".join(m) for m in form["model"]["merges"]]
    return form


def sentencepiece_model(size):
    """A BPE model over ▁-words with <unk>, <s>, </s> and 256 byte tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(UNDERLINE, prepend_scheme="always")
    lines = [line for text in CORPUS[:7] for line in text.split("\n") if line]
    tok.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False),
    )
    trained = json.loads(tok.to_str())["model"]
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    # The order is that of converted SentencePiece models: merges first, characters last.
    pieces.sort(key=lambda p: len(p) == 1)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {p: i for i, p in enumerate(first + pieces)},
        "merges": trained["merges"],
    }


def sentencepiece(size, normalizer, pre_tokenizer, string_merges):
    def added(i, content):
        return {
            "id": i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }

    model = sentencepiece_model(size)
    if string_merges:
        model["merges"] = [" ".join(m) for m in model["merges"]]
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    form = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(i, t) for i, t in enumerate(["<unk>", "<s>", "</s>"])],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, bos, other],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {
                    "type": "Replace",
                    "pattern": {"String": UNDERLINE},
                    "content": " ",
                },
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": model,
    }
    tok = Tokenizer.from_str(json.dumps(form))
    tok.add_tokens(
        [
            AddedToken("<plain>", normalized=True),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
        ]
    )
    full = json.loads(tok.to_str())
    full["model"]["merges"] = model["merges"]
    return full


def llama2():
    """Llama 2: the normalizers Prepend and Replace, no pre-tokenizer, and merges as strings."""
    return sentencepiece(
        560,
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": UNDERLINE},
                {"type": "Replace", "pattern": {"String": " "}, "content": UNDERLINE},
            ],
        },
        None,
        True,
    )


def mistral():
    """Mistral: a Metaspace pre-tokenizer with prepend_scheme "first" that does not split."""
    return sentencepiece(
        520,
        None,
        {
            "type": "Metaspace",
            "replacement": UNDERLINE,
            "prepend_scheme": "first",
            "split": False,
        },
        False,
    )


def metaspace_decoder():
    """Metaspace as pre-tokenizer (it splits, prepend_scheme "always") and as decoder. Unknown characters are fused."""
    form = sentencepiece(
        480,
        {"type": "NFKC"},
        {
            "type": "Metaspace",
            "replacement": UNDERLINE,
            "prepend_scheme": "always",
            "split": True,
        },
        False,
    )
    form["model"]["byte_fallback"] = False
    form["decoder"] = {
        "type": "Metaspace",
        "replacement": UNDERLINE,
        "prepend_scheme": "always",
        "split": True,
    }
    return form


TOKENIZERS = {
    "gpt2": (gpt2, dict(eos_token="<|endoftext|>")),
    "gpt2-prefix-space": (
        gpt2_prefix_space,
        dict(bos_token="<s>", eos_token="</s>"),
    ),
    "llama3": (
        llama3,
        dict(
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
            chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
            "<|eot_id|>{% endfor %}",
        ),
    ),
    "qwen2": (
        qwen2,
        dict(
            bos_token=None,
            eos_token={"__type": "AddedToken", "content": "<|im_end|>"},
            chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content }}<|im_end|>\n{% endfor %}",
        ),
    ),
    "llama2": (
        llama2,
        dict(
            bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": False},
            eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False},
        ),
    ),
    "mistral": (mistral, dict(bos_token="<s>", eos_token="</s>")),
    "metaspace-decoder": (metaspace_decoder, dict(bos_token="<s>", eos_token="</s>")),
}


def encode_case(tok, text):
    """One case of encoding. A field that equals an earlier one is left out (see README.md)."""
    ids = tok.encode(text, add_special_tokens=True).ids
    bare = tok.encode(text, add_special_tokens=False).ids
    tok.encode_special_tokens = True
    plain = tok.encode(text, add_special_tokens=False).ids
    tok.encode_special_tokens = False
    case = {"text": text, "ids": ids}
    if bare != ids:
        case["ids_no_special"] = bare
    if plain != bare:
        case["ids_plain"] = plain
    return case | decode_case(tok, ids, text)


def decode_case(tok, ids, text):
    case = {}
    decoded = tok.decode(ids, skip_special_tokens=False)
    skipped = tok.decode(ids, skip_special_tokens=True)
    if decoded != text:
        case["decoded"] = decoded
    if skipped != decoded:
        case["decoded_skip_special"] = skipped
    return case


def random_ids(tok, name):
    """Yields runs of ids that no text gives. With byte fallback, byte tokens form only whole characters, or runs
    without any valid character. README.md describes how mixed runs are decoded."""
    rng = random.Random(name)
    pieces = tok.get_vocab(with_added_tokens=True)
    bytes_of = {p: i for p, i in pieces.items() if len(p) == 6 and p.startswith("<0x")}
    others = sorted(set(pieces.values()) - set(bytes_of.values()))

    def byte_run(data):
        return [bytes_of[f"<0x{b:02X}>"] for b in data]

    for length in (1, 1, 2, 3, 5, 8, 12, 20, 40):
        yield [rng.choice(others) for _ in range(length)]
    if bytes_of:
        word = others[50]
        good = "é河🙂\n".encode()
        for run in (good, good[:2], b"\xff", b"\xe6\xb2", b"\x80\x80\xc3", b"\n"):
            yield byte_run(run)
            yield [word] + byte_run(run) + [word]
        # There is a word on both sides of </s>. If </s> is left out, it must not join them.
        broken = byte_run(b"\xf0\x9f\x99")
        yield [1] + byte_run(good) + [word, 2] + broken + [word]


def write_cases(folder, tok, name, texts):
    encode = [encode_case(tok, text) for text in texts]
    decode = [
        {"ids": ids} | decode_case(tok, ids, None) for ids in random_ids(tok, name)
    ]
    lines = []
    for key, cases in (("encode", encode), ("decode", decode)):
        body = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
        lines.append(f'"{key}": [\n{body}\n]')
    (folder / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_json(path, value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text.replace('"merges":', '\n"merges":') + "\n")


def pipeline_base():
    """A BPE with merges across spaces, digits and punctuation, so that only the pre-tokenizer under test separates
    words."""
    tok = Tokenizer(models.BPE(unk_token="?"))
    corpus = [t for t in PIPELINE_TEXTS if t] * 2 + ["the river 12", ", the ", "!!345"]
    alphabet = sorted({c for t in corpus for c in t if c < "\u0250"})
    tok.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=230,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            special_tokens=["?"],
        ),
    )
    form = json.loads(tok.to_str())
    form["added_tokens"] = []
    return form


BEHAVIORS = (
    "Isolated",
    "Removed",
    "MergedWithPrevious",
    "MergedWithNext",
    "Contiguous",
)


def pipeline_variants():
    """Pairs of (normalizer, pre_tokenizer) for the one base model."""

    def split(pattern, behavior, invert=False):
        return {
            "type": "Split",
            "pattern": pattern,
            "behavior": behavior,
            "invert": invert,
        }

    for behavior in BEHAVIORS:
        yield None, split({"String": "ab"}, behavior)
        yield None, split({"Regex": r"\s+|\d"}, behavior)
        yield None, split({"Regex": r"\p{L}+"}, behavior, True)
        yield None, {"type": "Punctuation", "behavior": behavior}
    yield None, {"type": "Whitespace"}
    yield None, {"type": "WhitespaceSplit"}
    yield None, {"type": "Digits", "individual_digits": False}
    yield None, {"type": "Digits", "individual_digits": True}
    yield None, {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            split({"String": " "}, "MergedWithNext"),
            {"type": "Punctuation", "behavior": "Contiguous"},
        ],
    }
    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        yield {"type": form}, None
    for left, right in ((True, True), (True, False), (False, True)):
        yield {"type": "Strip", "strip_left": left, "strip_right": right}, None
    yield {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, None
    yield {"type": "Replace", "pattern": {"String": "the"}, "content": ""}, None
    yield {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFD"},
            {"type": "Lowercase"},
            {"type": "Replace", "pattern": {"Regex": r"\p{Mn}"}, "content": ""},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Prepend", "prepend": "the "},
        ],
    }, {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Metaspace",
                "replacement": "_",
                "prepend_scheme": "first",
                "split": True,
            },
            {"type": "Punctuation", "behavior": "Isolated"},
        ],
    }


def write_pipelines(folder):
    folder.mkdir()
    base = pipeline_base()
    write_json(folder / "base.json", base)
    blocks = []
    for normalizer, pre in pipeline_variants():
        tok = Tokenizer.from_str(
            json.dumps(base | {"normalizer": normalizer, "pre_tokenizer": pre})
        )
        cases = [[t, tok.encode(t).ids] for t in PIPELINE_TEXTS]
        head = json.dumps({"normalizer": normalizer, "pre_tokenizer": pre})[:-1]
        body = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
        blocks.append(f'{head}, "cases": [\n{body}\n]}}')
    (folder / "variants.json").write_text("[\n" + ",\n".join(blocks) + "\n]\n")


def write(root, built_in):
    folder = root / "tokenizers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    built = []
    for name, (build, config) in TOKENIZERS.items():
        (folder / name).mkdir()
        form = build()
        write_json(folder / name / "tokenizer.json", form)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / name / "tokenizer_config.json").write_text(text)
        tok = Tokenizer.from_str(json.dumps(form))
        write_cases(folder / name, tok, name, TEXTS)
        built.append((name, tok))
        print(f"  {name}: {tok.get_vocab_size()} tokens")
    write_pipelines(folder / "pipelines")
    golden_nasty.write(folder / "nasty", built)
    golden_unicode.write(folder)
    if (built_in / "tokenizer.json").exists():
        (folder / "tiny").mkdir()
        tok = Tokenizer.from_file(str(built_in / "tokenizer.json"))
        write_cases(folder / "tiny", tok, "tiny", TEXTS)
