"""The plainest map between two numbers of heads, from which learnt head maps start."""

import torch


def regrouping(rows: int, columns: int) -> torch.Tensor:
    """A (rows, columns) map: copies of neighbours where there are more rows, averages where there are fewer.

    The identity where both are equal. Going up and down again gives the identity back.
    """
    many, few = max(rows, columns), min(rows, columns)
    member_of = torch.arange(many) * few // many
    membership = torch.nn.functional.one_hot(member_of, few).to(torch.float64)
    if rows >= columns:
        return membership
    return membership.T / membership.sum(0).unsqueeze(-1)
