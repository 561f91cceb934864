"""Text from a checkpoint, token by token: the demo model (`pip install ./demo`), or the directory given as argument."""

import sys

from flashkernel.generate import Engine, SamplingOptions, TextStream, TextTokenizer, find_model, load_model

directory = sys.argv[1] if len(sys.argv) > 1 else find_model("demo")
prompt = "def read_lines(path):\n"

tokenizer = TextTokenizer(directory)
engine = Engine(load_model(directory))
ids = tokenizer.encode(prompt)
stream = TextStream(tokenizer, ids)

print(prompt, end="")
for event in engine.generate([ids], max_new_tokens=80, sampling=SamplingOptions(temperature=0.7, top_p=0.9, seed=1)):
    print(stream.put(event.token), end="", flush=True)
print(stream.end())
print(f"\n{engine.stats.decode_rate:.0f} tokens/s", file=sys.stderr)
