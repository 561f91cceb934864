"""`flashkernel bench survey`: some 300 shapes from real models and servers, each beside the best peers that are there.

tables/             which shapes: one file a family, nothing but data
attention.py        an attention row: its tensors, our call, its size scaled down for a CPU
attention_peers.py  attention by others, as raw ops that a CUDA graph can hold
formula.py          attention by its formula in float32: what the others are checked against
matrices.py         linear, norms and their like, the loss, merging of states, sampling
summary.py          one number, the least ten, the rows behind
command.py          the command
"""
