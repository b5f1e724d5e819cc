"""A GPT trained with flashtile: the papers' end-to-end proof, on a laptop's CPU or on a large GPU.

`model.py` is the GPT, `attentions.py` the three attentions it can have, `data.py` its text, `loop.py` what
happens in a step, `checkpoint.py` how a run survives being killed; `flashtile train` is `command.py`.
"""

from flashtile.train.attentions import ATTENTIONS, Visible
from flashtile.train.data import Corpus, Tokenizer, read_corpus
from flashtile.train.flops import model_flops
from flashtile.train.loop import Training
from flashtile.train.model import GPT, Shape
from flashtile.train.settings import PRESETS, Settings

__all__ = [
    "ATTENTIONS",
    "GPT",
    "PRESETS",
    "Corpus",
    "Settings",
    "Shape",
    "Tokenizer",
    "Training",
    "Visible",
    "model_flops",
    "read_corpus",
]
