"""Generate text under torchrun: every process that it starts is one rank.

torchrun --nproc-per-node 2 examples/04_torchrun.py [CHECKPOINT]

All processes run this file and call the model in the same order. Each reads and holds only its
part of the weights. `tp` defaults to the number of processes. Without torchrun the file runs on
one rank. The default checkpoint is build/demo; `tpcompile make-demo build/demo` creates it.
"""

import sys

import torch.distributed as dist
from transformers import AutoTokenizer

import tpcompile

directory = sys.argv[1] if len(sys.argv) > 1 else "build/demo"

with tpcompile.compile(directory) as model:
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    ids = tokenizer("Anna is", return_tensors="pt")["input_ids"]
    tokens = model.generate(ids, max_new_tokens=32, do_sample=False)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{model.tp} ranks: {tokenizer.decode(tokens[0], skip_special_tokens=True)}")
