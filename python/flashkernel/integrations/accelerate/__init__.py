"""`accelerate(model)`: a model of Transformers generates by FlashKernel's engine.

attach.py      `accelerate` and `restore`: what the model gets and gives back; copies and pickles of it
build.py       the engine's model on the parameters of the stock one, and what can't be computed
protocol.py    what the engine's models tell about the parameters that they compute with
supported.py   whether every module is the stock one that the engine computes
follow.py      whether the model changed since, and what must be dropped or made anew
generate.py    `generate` as Transformers has it: its own preparation, then the engine
choices.py     processors and stopping criteria that the engine's own sampling covers
penalties.py   frequency and presence penalties as a processor of Transformers
steps.py       all others: step by step, by Transformers' own functions
"""

from .attach import accelerate, restore

__all__ = ["accelerate", "restore"]
