"""Pages of requests with garbage wherever reading is forbidden, and attention over them written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch


def paged(
    random: Callable[..., torch.Tensor], kv_tokens: list[int], width: int, *, seed: int = 0, unused: float = torch.inf
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages, page table and lengths of requests whose pages lie in any order.

    Args:
        random: makes tensors of a shape and a seed, on a device.
        width: of a latent.
        unused: fills the page that no request has; behind a request's last token there are infinities.
    """
    num_pages = [-(-tokens // 64) for tokens in kv_tokens]
    ids = torch.randperm(sum(num_pages) + 1, generator=torch.Generator().manual_seed(seed))
    pages = random(len(ids), 64, width, seed=seed)
    table = torch.full((len(kv_tokens), max(num_pages)), int(ids[-1]))
    pages[ids[-1]] = unused
    for request, (tokens, count) in enumerate(zip(kv_tokens, num_pages, strict=True)):
        table[request, :count] = ids[sum(num_pages[:request]) :][:count]
        if count:
            pages[table[request, count - 1], tokens - 64 * (count - 1) :] = torch.inf
    return pages, table.to(pages.device), torch.tensor(kv_tokens, device=pages.device)


def decoded(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row; also the sums of what is added, without its sign."""
    num_queries = len(q) // len(table)
    rows, terms = [], []
    for row, position in enumerate(positions.tolist()):
        keys = pages[table[row // num_queries]].flatten(0, 1)[: position + 1].double()
        weights = torch.softmax(q[row].double() @ keys.T * scale, dim=-1)
        rows.append(weights @ keys[:, :latent_dim])
        terms.append(weights @ keys[:, :latent_dim].abs())
    return torch.stack(rows), torch.stack(terms)
