"""Routers follow given choices: those of Hugging Face, of graphs, and of emitted modules."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.captures import captured_once
from tests.mixtures import FAMILIES, VOCABULARY, lively_mixture, random_mixture
from tests.models import relative_error
from tpcompile.compare.agreement import WatchedRanks
from tpcompile.compare.routing import Replay, choices_in, routed, routers_in
from tpcompile.errors import UnsupportedError
from tpcompile.ir.ops import TOP_EXPERTS
from tpcompile.ir.ops.experts import scores_of
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.runtime.kv.packing import pack
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.step import Routing, Step, digest
from tpcompile.runtime.weights import opened, weights_of

IDS = torch.randint(VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(1))
TOKENS = IDS.numel()


@lru_cache
def eager(family: str) -> Any:
    return lively_mixture(random_mixture(1, family), 1)


def others(config: Any, routers: dict[int, str]) -> dict[int, torch.Tensor]:
    """Return random choices by layer."""
    generator = torch.Generator().manual_seed(2)
    count, chosen = config.num_experts, config.num_experts_per_tok
    orders = {n: torch.rand(TOKENS, count, generator=generator).argsort(-1) for n in routers}
    return {layer: order[:, :chosen].contiguous() for layer, order in orders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sides_agree_under_any_choices(family: str) -> None:
    """Eager, the captured graph, the sharded graph and the modules follow choices of none."""
    model = eager(family)
    captured = captured_once(model)
    routers = routers_in(captured.graph.graph)
    choices = others(model.config, routers)
    with torch.inference_mode(), routed(model, routers, choices) as theirs:
        expected = model(IDS, use_cache=False).logits[0]
    assert all(torch.equal(theirs[layer].ids, ids) for layer, ids in choices.items())
    weights = weights_of(captured, model, None)
    sharded, stages = run_passes(captured.graph, default_pipeline(2))
    packed = pack(IDS)
    for gm in (captured.graph, sharded):
        replay = Replay(gm.graph, choices)
        with opened(weights) as read, torch.inference_mode():
            arguments = materialise(gm, read), captured.rotary.fresh(), replay.instead
            values = run_ranks(gm, packed.inputs(), *arguments)
            replayed = replay.own_choices(values)
        assert relative_error(logits_of(values)[0].view_as(expected), expected) < 1e-5
        for layer, theirs_here in theirs.items():
            assert relative_error(replayed[layer][0].logits, theirs_here.logits) < 1e-5
            assert not torch.equal(replayed[layer][0].ids, choices[layer])
    modules = rank_modules(sharded)
    with opened(weights) as read:
        ranks = InProcessRanks(modules, read, captured.rotary.fresh, torch.device("cpu"))
        watched = WatchedRanks(ranks, modules[0].routers)
        watched.experts = tuple(choices.values())
        with CompiledModel(captured, sharded, stages, watched) as compiled:
            assert relative_error(compiled(IDS).logits[0], expected) < 1e-5
    assert watched.agree_so_far
    for mine, theirs_here in zip(watched.choices, theirs.values(), strict=True):
        assert relative_error(mine.logits, theirs_here.logits) < 1e-5
        assert mine.scores.shape == mine.ids.shape == theirs_here.ids.shape


def test_scores_of_given_experts_are_computed_by_hugging_face() -> None:
    model = eager("qwen3_next")
    routers = routers_in(captured_once(model).graph.graph)
    choices = others(model.config, routers)
    with torch.inference_mode(), routed(model, routers, choices) as theirs:
        model(IDS, use_cache=False)
    for routing in theirs.values():
        expected = scores_of(routing.logits, routing.ids, model.config.norm_topk_prob)
        assert relative_error(routing.scores, expected) < 1e-6


def test_a_router_is_the_same_afterwards() -> None:
    model = eager("qwen3_moe")
    routers = routers_in(captured_once(model).graph.graph)
    with torch.inference_mode():
        before = model(IDS).logits
        with (
            pytest.raises(ZeroDivisionError),
            routed(model, routers, others(model.config, routers)),
        ):
            raise ZeroDivisionError
        assert torch.equal(model(IDS).logits, before)
    assert not any("forward" in vars(model.get_submodule(path)) for path in routers.values())


def test_a_router_without_topk_is_refused() -> None:
    model = eager("qwen3_moe")
    routers = routers_in(captured_once(model).graph.graph)
    router = model.get_submodule(next(iter(routers.values())))
    forward = router.forward
    router.forward = lambda x: (None, None, torch.zeros(TOKENS, 1, dtype=torch.int64))
    try:
        choices = others(model.config, routers)
        message = "does not choose experts by torch.topk"
        with pytest.raises(UnsupportedError, match=message), routed(model, routers, choices):
            model(IDS)
        assert "forward" in vars(router)  # that of the user is restored
    finally:
        router.forward = forward


def test_dense_models_have_no_routers() -> None:
    graph = captured_once(eager("qwen3_moe")).graph.graph
    assert [node.target for node in choices_in(graph).values()] != [TOP_EXPERTS]
    assert Replay(graph, {}).instead == {}


def test_steps_of_other_choices_have_other_digests() -> None:
    """Under a launcher, all processes must pass the same."""
    inputs = pack(IDS).inputs()
    requests = (None, Routing(), *(Routing((torch.tensor([[n]]),)) for n in range(2)))
    digests = [digest(Step(inputs, "logits", routing=routing)).tolist() for routing in requests]
    assert len({tuple(values) for values in digests}) == len(requests)
