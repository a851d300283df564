"""One norm of gradients that are spread over ranks in different ways, without a deadlock where ranks differ.

Each part of a gradient has a `Place`: a description of the process groups with its other parts that all
ranks can compare. All ranks reduce in the order of the places, whatever the order of their parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from keyedopt.reference.gradients import Groups, mesh_groups

#: Number of groups, their strides and names. Or 0, the ranks of a mesh, and its dimensions with shards.
Place = tuple[int, tuple[int, ...], tuple[Any, ...]]
HERE: Place = (-1, (), ())  # all of the gradient is on this rank


class SpreadNorm:
    """The places of all ranks; a copy shares the process groups.

    Args:
        pgs: the process groups over which parameters are spread. A `DTensor` is spread over its mesh.
        joins: whether all ranks of ``everyone`` take part, also those without a part of a gradient.
        everyone: a process group; None is the default group.
    """

    def __init__(self, pgs: Mapping[Any, Groups], joins: bool, everyone: Any) -> None:
        self._pgs, self._everyone = pgs, (everyone,)
        self._joins = joins
        self._agreed: set[Place] = set()
        self._met = False  # whether the ranks have agreed
        self._groups: dict[Place, Groups] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_everyone": (None,), "_groups": {}, "_agreed": set(), "_met": False}

    def __deepcopy__(self, memo: Any) -> "SpreadNorm":
        pgs = {memo.get(id(param), param): groups for param, groups in self._pgs.items()}
        return SpreadNorm(pgs, self._joins, self._everyone[0])

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part, unless a parameter is a `DTensor`."""
        return not (self._pgs or self.joined)

    @property
    def joined(self) -> bool:
        """Whether all ranks take part."""
        return self._joins and dist.is_available() and dist.is_initialized() and self._size() > 1

    def _size(self) -> int:
        return dist.get_world_size(self._everyone[0])

    def norm(
        self,
        parts: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        p_norm: Callable[..., torch.Tensor],
        p: float,
        device: torch.device | None,
        params: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the norm of all gradients on all ranks.

        Args:
            parts: parameters, each with the parts of its gradient on this rank.
            p_norm: the norm of some tensors over process groups; see `norms.p_norm`.
            p: the exponent.
            device: the device of the reductions; None if this rank has no parameter.
            params: the parameters by key, for error messages.

        Raises:
            ValueError: a parameter is on a mesh without this rank, and the ranks do not join; or, on all
                ranks, a rank that lacks a parameter cannot know one of its process groups.
            RuntimeError: a reduction failed; the message names parameters and ranks.
        """
        if device is None:
            joined = self.joined
            device = torch.device(_collective_device(self._everyone[0]) if joined else "cpu")
        sharded = (isinstance(one, DTensor) for param, _ in parts for one in (param, param.grad))
        if self.alone and not any(sharded):  # on one rank, places would only cost time
            return p_norm([tensor for _, tensors in parts for tensor in tensors], p, device)
        held: dict[Place, list[torch.Tensor]] = {self._place(param): [] for param in self._pgs}
        for param, tensors in parts:
            held.setdefault(self._place(param), []).extend(tensors)
        if any(map(self._is_outside, held)) and not self.joined and any(held.values()):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh of {self._keys(params, self._is_outside)}, so it "
                "cannot know the norm: on all ranks pass enable_global_grad_clip=True and param_to_pgs={}"
            )
        if self.joined and not (self._met and self._agreed >= held.keys()):
            self._agree(set(held))
        norms: dict[Place, torch.Tensor] = {}
        for place in sorted(self._agreed | held.keys() if self.joined else held):
            groups = self._find(place)
            if groups is None:
                continue
            try:
                norms[place] = p_norm(held.get(place, ()), p, device, groups)
            except RuntimeError as error:
                ranks = [dist.get_process_group_ranks(group) for group in groups]
                what = self._keys(params, place.__eq__)
                raise RuntimeError(
                    f"rank {dist.get_rank()} could not reduce the norm of {what} over the ranks {ranks}: "
                    f"{error}"
                ) from error
        self._share(norms, held, device)
        found = list(norms.values())
        return found[0] if len(found) == 1 else p_norm(found, p, device, ())

    def _place(self, param: torch.Tensor) -> Place:
        """Return the place of a parameter, and note its process groups."""
        if param in self._pgs:
            groups = self._pgs[param]
        else:
            spread = param.grad if isinstance(param.grad, DTensor) else param
            if not isinstance(spread, DTensor):
                return HERE
            mesh = spread.device_mesh
            outside = mesh.get_coordinate() is None
            if outside or (self.joined and mesh.size() < self._size()):
                ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
                kinds = enumerate(spread.placements)
                place: Place = (
                    0,
                    ranks,
                    tuple(dim for dim, kind in kinds if not isinstance(kind, Replicate)),
                )
                self._groups[place] = () if outside else mesh_groups(param)
                return place
            groups = mesh_groups(param)
        if len(groups) > 1:  # other ranks cannot know a group of one rank, which changes no norm
            groups = tuple(group for group in groups if dist.get_world_size(group) > 1) or groups[:1]
        if not groups:
            return HERE
        described = sorted((_stride(group), group.group_name) for group in groups)
        place = len(described), tuple(one for one, _ in described), tuple(name for _, name in described)
        order = {group.group_name: group for group in groups}
        self._groups[place] = tuple(order[name] for name in place[2])
        return place

    def _keys(self, params: Mapping[str, torch.Tensor], chosen: Callable[[Place], bool]) -> str:
        keys = [key for key, param in params.items() if chosen(self._place(param))]
        return ", ".join(keys[:5]) or "no parameter of this rank"

    def _is_outside(self, place: Place) -> bool:
        return place[0] == 0 and dist.get_rank() not in place[1]

    def _agree(self, held: set[Place]) -> None:
        """Learn the places of all ranks.

        Raises:
            ValueError: on all ranks, if a rank that lacks a parameter cannot know one of its process groups.
        """
        self._met = True
        own_ranks = {
            group.group_name: dist.get_process_group_ranks(group)
            for place in held
            if place[0] > 1
            for group in self._groups.get(place, ())
        }
        everywhere: list[Any] = [None] * self._size()
        dist.all_gather_object(everywhere, (held, own_ranks), group=self._everyone[0])
        ranks = {name: numbers for _, listed in everywhere for name, numbers in listed.items()}
        reported: set[Place] = set().union(*(places for places, _ in everywhere)) - {HERE}
        self._agreed = reported | held
        for count, strides, _ in reported:
            alike = [place for place in reported if place[:2] == (count, strides)]
            if count > 1:
                _check_cover([[ranks[name] for name in place[2]] for place in alike])
            if count > 1 and not any(self._find(place) for place in alike):
                # The ranks of a mesh with several dimensions have other groups: find those of this rank.
                listed = zip(*(place[2] for place in alike), strict=True)
                own = tuple(next(filter(_member, names), "") for names in listed)
                self._agreed.add((count, strides, own))

    def _find(self, place: Place) -> Groups | None:
        """Return the groups of a place, or None if this rank has no part in it."""
        if place not in self._groups and place != HERE:
            if place[0] == 0 or not all(map(_member, place[2])):
                return None
            self._groups[place] = tuple(map(_member, place[2]))
        return None if self._is_outside(place) else self._groups.get(place, ())

    def _share(
        self, norms: dict[Place, torch.Tensor], held: Mapping[Place, Any], device: torch.device
    ) -> None:
        """Send the norms of gradients on a part of the ranks to the other ranks that list the parameters."""
        shared = sorted(place for place in self._agreed if place[0] == 0)
        if not (shared and self.joined):
            return
        sums = torch.zeros(len(shared), dtype=torch.float64, device=device)
        for index, place in enumerate(shared):
            if place[1][0] == dist.get_rank() and place in norms:
                sums[index] = norms[place]
        dist.all_reduce(sums, group=self._everyone[0])
        for index, place in enumerate(shared):
            if place in held:
                norms[place] = sums[index]


def _check_cover(listed: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise ValueError unless the groups of each dimension of a mesh have the same ranks.

    Args:
        listed: the ranks of each process group, a list for each parameter that some rank has.
    """
    covers = [sorted(set().union(*groups)) for groups in zip(*listed, strict=True)]
    if any(cover != covers[0] for cover in covers):
        raise ValueError(
            f"process groups in param_to_pgs, of parameters with several groups, have the ranks {covers}. "
            "They must have the same ranks, so that a rank without a parameter knows its groups: list a "
            "parameter on a rank of each row and of each column of the mesh"
        )


def _collective_device(group: Any) -> str:
    return str(dist.distributed_c10d._get_object_coll_device(group))


def _stride(group: Any) -> int:
    ranks = sorted(dist.get_process_group_ranks(group))
    return ranks[1] - ranks[0] if len(ranks) > 1 else 0


def _member(name: str) -> Any:
    """Return the process group with a name, or None if this rank is not in it."""
    known = dist.distributed_c10d._world.pg_names
    return next((group for group, called in known.items() if called == name), None)
