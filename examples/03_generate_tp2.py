"""Generate text on two ranks, and compare it with the text that Hugging Face eager generates.

Each rank is a separate process. The ranks never import this file, so it needs no
`if __name__ == "__main__"`. The process that runs this file distributes the work and is not a
rank.

python examples/03_generate_tp2.py [CHECKPOINT]

The default checkpoint is the demo model in build/demo, which is trained first if it is missing.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpcompile
from tpcompile.demo import make_demo

PROMPTS = ["Anna is", "The grey cat of", "Maria is a beekeeper"]
NEW_TOKENS = 32

directory = sys.argv[1] if len(sys.argv) > 1 else "build/demo"
if not Path(directory).exists():
    print("training the demo model once, about a minute")
    make_demo(directory)

tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

with tpcompile.compile(directory, tp=2) as model:
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)

for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
    print(f"  {text}")

eager = AutoModelForCausalLM.from_pretrained(directory).eval()
expected = eager.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
if not torch.equal(tokens, expected):
    raise SystemExit("The tokens differ from those of Hugging Face eager.")
print(f"all {tokens[:, -NEW_TOKENS:].numel()} tokens are equal to those of Hugging Face eager")
