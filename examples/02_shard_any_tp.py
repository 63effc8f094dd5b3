"""Compile one model for every tp and compare each with Hugging Face eager.

All ranks run in this process. The model has 14 query heads and 2 KV heads, like Qwen2.5-0.5B, so
most of these splits are uneven.

python examples/02_shard_any_tp.py
"""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import tpcompile

LIMIT = 1e-5
"""The largest relative error allowed in fp32, where sums are added in another order."""


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=112,
        intermediate_size=304,
        num_hidden_layers=4,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=1009,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    eager = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = torch.randint(1009, (3, 24))
    mask = torch.ones_like(prompts)
    mask[1, :9] = 0  # two of the three prompts are shorter, padded on the left
    mask[2, :20] = 0
    with torch.inference_mode():
        expected = eager(prompts, attention_mask=mask).logits[mask.bool()]

    print("tp  query heads      KV heads         error     same tokens")
    for tp in range(1, 9):
        with tpcompile.compile(eager, tp=tp, simulate=True) as model:
            logits = model(prompts, attention_mask=mask).logits[mask.bool()]
            ranks = model.plan.ranks
        error = float((logits - expected).abs().max() / expected.abs().max())
        same = bool((logits.argmax(-1) == expected.argmax(-1)).all())
        queries = " ".join(str(rank.q_heads) for rank in ranks)
        keys = " ".join(str(rank.kv_heads) for rank in ranks)
        print(f"{tp:2}  {queries:15}  {keys:15}  {error:.1e}  {'yes' if same else 'NO'}")
        if error > LIMIT or not same:
            raise SystemExit(f"tp={tp} differs from Hugging Face")


if __name__ == "__main__":
    main()
