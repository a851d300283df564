"""LAMB, with the norms of rows."""

from keyedopt.reference import rules
from keyedopt.reference.adam import AdamLike

__all__ = ["LAMB"]


class LAMB(AdamLike):
    r"""LAMB with the norms of rows: `rules.lamb`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        r &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \gamma \frac{\lVert w \rVert}{\lVert r \rVert} r

    The ratio of the norms is 1 if either is zero.

    State, from the first step on: `step`, one count or (rows,), and `exp_avg` and `exp_avg_sq`, as the table.

    Args:
        params: tables (rows, width), or groups of tables.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        weight_decay: λ, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"decoupled"``, ``"l2"`` or ``"none"``.
        bias_correction: which steps t counts: ``"global"``, all of the parameter, or ``"per_row"``, those in
            which the row had a gradient.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is not a table of floats.

    Source: You et al. 2020; FBGEMM's LAMB. The norms in the paper are of a layer, here of a row.

    >>> import torch
    >>> from keyedopt.reference import LAMB
    >>> table = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = LAMB([table], lr=0.5, betas=(0.5, 0.75))
    >>> table.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> [[round(one, 4) for one in row] for row in table.tolist()]
    [[0.5, 0.5], [1.0, 1.0]]
    >>> optimizer.state[table]["exp_avg_sq"].tolist()
    [[2.25, 4.0], [0.0, 0.0]]
    """

    function = staticmethod(rules.lamb)
    tables_only = True
