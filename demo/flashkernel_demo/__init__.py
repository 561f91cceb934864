"""A small GPT-2 for tests and for machines without a network; ``PATH`` is its folder, a Hugging Face checkpoint.

>>> from flashkernel.generate import find_model
>>> import flashkernel_demo
>>> find_model("demo") == flashkernel_demo.PATH
True
"""

from pathlib import Path

PATH = Path(__file__).resolve().parent / "gpt2-python"
