#!/usr/bin/env python3
"""Trains the byte-level BPE of the built-in model.

    pip install -r requirements.txt
    ./make_tokenizer.py --text train.txt --out .

Writes tokenizer.json and tokenizer_config.json in the Hugging Face form. The
result depends on the text and the vocabulary size only.
"""

import argparse
import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers import processors, trainers

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
# The split of Llama 3: words with their leading space, numbers in threes, runs
# of punctuation, line ends, other whitespace. So this small model uses the same
# code as the large ones.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)


def train(text: pathlib.Path, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with text.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator(lines, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A {BOS} $B",
            special_tokens=[(BOS, bos_id)],
        ),
    ])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=1024,
                        help="context of the model the tokenizer is for")
    args = parser.parse_args()

    tokenizer = train(args.text, args.vocab_size)
    if tokenizer.get_vocab_size() != args.vocab_size:
        raise SystemExit(f"want {args.vocab_size} tokens, the text gave "
                         f"{tokenizer.get_vocab_size()}")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": args.max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
