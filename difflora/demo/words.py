"""The two tokenizers: whole words for what captions say and for common prompt words, single characters otherwise."""

import json
import string

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizer, T5Tokenizer

from difflora.demo.geometry import HUES, POLYGONS

CAPTION_WORDS = ("a", "an", "the", "one", "picture", "image", "drawing", "of", "small", "big", "on", "white", "grey")
PROMPT_WORDS = (
    "and", "with", "in", "at", "by", "for", "from", "to", "is", "it", "no", "not", "two", "three", "many", "some",
    "photo", "painting", "sketch", "art", "illustration", "style", "outline", "outlined", "striped", "stripes",
    "night", "pastel", "dark", "light", "bright", "fast", "line", "lines", "colour", "color", "colours",
    "background", "black", "brown", "gold", "silver", "gray", "hexagon", "diamond", "ring", "oval", "arrow",
    "flower", "cat", "dog", "house", "tree", "sun", "cloud", "large", "tiny", "huge", "left", "right", "top",
    "bottom", "center", "centre", "middle", "beautiful", "simple", "clean", "high", "quality", "detailed", "please",
    "draw", "make", "show",
)  # fmt: skip
WORDS = sorted({*CAPTION_WORDS, *PROMPT_WORDS, *HUES, *POLYGONS})
CHARACTERS = string.ascii_letters + string.digits + ".,:;!?'\"-_()/+"

CLIP_LENGTH = 77
T5_LENGTH = 512
START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-pair tokenizer that knows every word of `WORDS`; start, end and padding ids are 0, 1 and 1."""
    learner = Tokenizer(BPE(end_of_word_suffix=WORD_END))
    learner.pre_tokenizer = WhitespaceSplit()
    singles = [*CHARACTERS.lower()]
    trainer = BpeTrainer(
        vocab_size=2000, end_of_word_suffix=WORD_END, special_tokens=[START, END], initial_alphabet=singles,
        show_progress=False,
    )  # fmt: skip
    learner.train_from_iterator([*WORDS, *singles], trainer)
    learned = json.loads(learner.to_str())["model"]
    vocab = dict(learned["vocab"])
    merges = [(left, right) for left, right in learned["merges"]]
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)  # type: ignore[arg-type]


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer that prefers the words of `WORDS`; padding, end and unknown ids are 0, 1 and 2."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS if f"▁{word}" != "▁"]
    pieces += [(character, -6.0) for character in CHARACTERS]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)
