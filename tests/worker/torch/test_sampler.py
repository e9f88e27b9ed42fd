import pytest
import torch

from pensieve.core.plan import Sample
from pensieve.device import sampler
from pensieve.device.sampler import gumbel_noise, noise_starts

from .driver import drawn


def noise_of(key: int, position: int, vocab: int) -> torch.Tensor:
    return gumbel_noise(torch.from_numpy(noise_starts([key], [position])), vocab)[0]


def _logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_noise_is_a_function_of_key_position_and_token() -> None:
    """Known numbers, of splitmix64 in Python's integers: another machine, process or version of torch must draw the same."""
    noise = noise_of(12345, 67, 4)
    assert torch.equal(noise, noise_of(12345, 67, 400)[:4])
    assert not torch.equal(noise, noise_of(12345, 68, 4))
    assert not torch.equal(noise, noise_of(12346, 67, 4))
    known = [-0.09156938543076616, 1.4739815092288118, 0.3701372086354088, 1.5397032001369004]
    assert noise.tolist() == pytest.approx(known, rel=1e-12)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]])
    count, temperature = 4000, 0.7
    tokens, _ = drawn(logits.expand(count, 4), [Sample(i, key=9, temperature=temperature) for i in range(count)])
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / count
    assert torch.allclose(shares, torch.softmax(logits[0] / temperature, dim=-1), atol=0.03)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = _logits(6)
    samples = [Sample(10 + i, key=77 * i, temperature=float(i > 1), top_p=0.9, top_k=20) for i in range(6)]
    together, _ = drawn(logits, samples)
    alone = [drawn(logits[i : i + 1], [samples[i]])[0][0] for i in range(6)]
    reversed_rows = drawn(logits.flip(0), samples[::-1])[0][::-1]
    assert together == alone == reversed_rows
    assert together[:2] == logits[:2].argmax(1).tolist(), "greedy and sampled rows share a batch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    """Logits of a 16-bit head are often equal; topk takes any of them."""
    logits = _logits(512, vocab=1000).bfloat16().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    ties = sum(row.count(max(row)) > 1 for row in logits.tolist())
    tokens, margins = drawn(logits, [Sample(1)] * 512)
    assert ties > 5 and tokens == expected
    assert [margin == 0 for margin in margins].count(True) == ties


def test_top_k_and_top_p_keep_the_first_by_score_then_by_token() -> None:
    """The sort of float32 logits keeps what the order of the scores keeps, with ties and at extreme temperatures."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(6, 500, generator=generator).mul_(3).round(decimals=1)
    temperatures = torch.tensor([[0.01], [0.3], [1.0], [1.0], [7.0], [100.0]], dtype=torch.float64)
    top_p = torch.tensor([[0.9], [0.5], [1.0], [0.0], [0.99], [0.3]], dtype=torch.float64)
    top_k = torch.tensor([[0], [7], [20], [0], [3], [0]])
    scores = keys.double() / temperatures
    kept = sampler._keep(scores, keys, top_p, top_k)
    for row in range(6):
        order = sorted(range(500), key=lambda token: (-float(scores[row, token]), token))
        allowed = order[: int(top_k[row])] if top_k[row] else order
        mass = torch.softmax(scores[row, allowed], 0)
        before, wanted = 0.0, set()
        for place, token in enumerate(allowed):
            if place == 0 or top_p[row] == 1.0 or before < float(top_p[row]) - 1e-12:
                wanted.add(token)
            before += float(mass[place])
        assert set(torch.isfinite(kept[row]).nonzero()[:, 0].tolist()) == wanted, row
    samples = [Sample(row, 4, float(temperatures[row]), float(top_p[row]), int(top_k[row])) for row in range(6)]
    for row, token in enumerate(drawn(keys, samples)[0]):
        assert torch.isfinite(kept[row, token])
