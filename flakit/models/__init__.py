"""Small language models on the operators, data that needs no download, and a training loop.

from flakit.models import LanguageModel, Permutations, train

model = LanguageModel(vocab=6, dim=32, layers=1, mixer="rwkv7", head_size=8, edit=2.0)
run = train(model, Permutations(items=3).batch, steps=200, T=16)
"""

from .accumulation import accumulate, check_gradient_accumulation, check_initial_loss
from .corpus import Corpus, standard_library
from .generation import generate, pad
from .language_model import IGNORED, MIXERS, LanguageModel, loss
from .ranks import sum_gradients
from .tasks import Copying, Delay, Permutations, Recall
from .training import Run, accuracy, mean_loss, train
from .watch import Alarm, HeadroomWarning, Recording, WatchWarning, recorded

__all__ = [
    "IGNORED",
    "MIXERS",
    "Alarm",
    "Copying",
    "Corpus",
    "Delay",
    "HeadroomWarning",
    "LanguageModel",
    "Permutations",
    "Recall",
    "Recording",
    "Run",
    "WatchWarning",
    "accumulate",
    "accuracy",
    "check_gradient_accumulation",
    "check_initial_loss",
    "generate",
    "loss",
    "mean_loss",
    "pad",
    "recorded",
    "standard_library",
    "sum_gradients",
    "train",
]
