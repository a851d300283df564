"""Situations: what a case makes stands beside others, is copied, reloaded, reordered or wrapped.

A clause names the dimensions in which it must hold: ``varies``, described in ``spec/dimensions.toml``. In a
situation the public names of ``impl`` make the same optimizer or embedding module among others that the case
does not see, so that its own becomes the second of everything. The case and what it expects are unchanged.
"""

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_bits, snapshot
from keyedopt.conformance.suite.support.called import Called, each, uncalled
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.hidden_parameter import WithHiddenParameter
from keyedopt.conformance.suite.support.inputs import MARK, _numbers

#: Makes a keyed optimizer from parameters by key, their state and groups.
OF_STATE = "KeyedOptimizer"
#: Makes a keyed optimizer from parameters by key and a factory of the inner optimizer.
WRAPPER_OF_KEYS = "KeyedOptimizerWrapper"
#: Make an optimizer from parameters or groups.
OPTIMIZER_NAMES = (
    *("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam", "LAMB"),
    *(
        "PartialRowWiseLAMB",
        "LarsSGD",
        "Ftrl",
        "SparseAdam",
        "AccumulateSGD",
        "AccumulateAdagrad",
        "AccumulateAdam",
    ),
    *("AccumulateRowWiseAdagrad", "AccumulateAdamW"),
)
#: Make an embedding module from configurations of tables, and the configurations.
EMBEDDINGS = {"EmbeddingBagCollection": "EmbeddingBagConfig", "EmbeddingCollection": "EmbeddingConfig"}
#: Applies a class of optimizers to parameters.
IN_BACKWARD = "apply_optimizer_in_backward"
#: Makes an optimizer from a manager and an optimizer.
FAULT_TOLERANT = "FaultTolerantOptimizer"
#: Options of the other group, if it has them. No case uses these values.
OPTIONS_BESIDE = {"lr": 0.34375, "weight_decay": 0.21875}
#: The name of the other table and of the other feature.
BESIDE = "beside"


class _Pulled(torch.autograd.Function):
    """Returns an output as it is, and gives other outputs the gradient 1 in the same backward pass."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return the first output."""
        ctx.others = others
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Pass on the gradient of the first output; each of the others has the gradient 1."""
        return grad, *map(torch.ones_like, ctx.others)


class Situated:
    """The public names of an implementation in a situation.

    Args:
        impl: the public names.
        situation: the dimensions in which the situation differs from none, with ``+`` between them, such as
            ``"group+frozen+last"``. Without ``last`` others come first.
    """

    def __init__(self, impl: Any, situation: str) -> None:
        self._impl, self._dimensions = impl, frozenset(situation.split("+"))
        self._beside: dict[int, tuple[Any, torch.nn.Parameter]] = {}
        self._unmoved: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._with_groups: list[tuple[Any, torch.nn.Parameter, Mapping[str, float]]] = []
        # torch's optimizers do not decay with sparse gradients
        self._options = OPTIONS_BESIDE | ({"weight_decay": 0.0} if self._is("layout") else {})
        #: The dimensions that were really built.
        self.built: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._impl, name)
        if name == WRAPPER_OF_KEYS:
            return Called(found, self._keyed)
        if name in OPTIMIZER_NAMES:
            return Called(found, functools.partial(self._optimizer, name))
        if name in EMBEDDINGS:
            return Called(found, functools.partial(self._tables, name))
        if name == OF_STATE:
            return Called(found, self.of_state)
        if name == FAULT_TOLERANT:
            return Called(found, self._fault_tolerant)
        if name == IN_BACKWARD:
            return functools.wraps(found)(functools.partial(self._in_backward, found))
        return found

    def check(self) -> None:
        """Expect what is beside the case as it must be: frozen tables, options of the other group."""
        for what, tensor, before in self._unmoved:
            expect_bits(tensor.detach(), before, f"{what} beside the others")
        for made, beside, options in self._with_groups:
            for group in _groups_of(made):
                if [id(param) for param in group["params"]] == [id(beside)]:
                    self._check_options(group, options)

    def _check_options(self, group: Mapping[str, Any], options: Mapping[str, float]) -> None:
        if "weight_decay" in group and "weight_decay" in options:
            decay, seen = options["weight_decay"], group["weight_decay"]
            expect(seen == decay, "weight_decay of the other group as it was", seen)
        if self._is("tensor-lr") and "lr" in group:
            expect(isinstance(group["lr"], torch.Tensor), "a tensor as learning rate", group["lr"])

    def _is(self, *dimensions: str) -> bool:
        return not self._dimensions.isdisjoint(dimensions)

    # --- optimizers ---------------------------------------------------------------------------------

    def _keyed(self, kind: Any, params: Any, factory: Any, *args: Any, **options: Any) -> Any:
        """Make a keyed optimizer."""
        if not isinstance(params, Mapping) or not params:
            return kind(params, factory, *args, **options)
        key, first = next(iter(params.items()))
        beside = self._parameter_beside(first, "SparseAdam" if _is_sparse(factory) else "")
        listed = dict(params)
        if beside is not None:
            new = {f"{BESIDE}_{key}": beside}
            listed = {**listed, **new} if self._is("last") else {**new, **listed}

        def build(given: Any) -> Any:
            if isinstance(given, Mapping):  # with pass_params_dict
                return factory(given)
            groups = self._groups([param for param in given if param is not beside], beside)
            outside, self._dimensions = self._dimensions, frozenset()  # the inner class stands beside nothing
            try:
                made = factory(groups)
            finally:
                self._dimensions = outside
            self._make_unlike(made, beside, self._options)
            return made

        made = self._lived(kind(listed, build, *args, **options), listed.values(), beside, self._options)
        if self._is("nesting"):
            made = self._impl.OptimizerWrapper(made)
            self.built["nesting"] = None
        return made

    def _optimizer(self, name: str, kind: Any, params: Any, *args: Any, **options: Any) -> Any:
        """Make an optimizer from parameters or groups."""
        params = list(params) if isinstance(params, Iterable) else params
        if not isinstance(params, list) or not params or not all(map(_is_entry, params)):
            return kind(params, *args, **options)
        first = params[0]["params"] if isinstance(params[0], dict) else params[0]
        first = first if isinstance(first, torch.Tensor) else next(iter(first), None)
        if not isinstance(first, torch.Tensor):
            return kind(params, *args, **options)
        for dimension, claim in (("group", "groups"), ("tensor-lr", "tensor_rate"), ("layout", "sparse")):
            if self._is(dimension) and self._impl.lacks(f"{name}.{claim}"):
                raise CannotRun(f"{name} does not take it", name=f"{name}.{claim}")
        beside = self._parameter_beside(first, name)
        made = kind(self._groups(params, beside), *args, **options)
        unlike = {one: value for one, value in self._options.items() if not self._impl.lacks(f"{name}.{one}")}
        self._make_unlike(made, beside, unlike)
        listed = [one["params"] if isinstance(one, dict) else one for one in params]
        own = [one for each in listed for one in ([each] if isinstance(each, torch.Tensor) else each)]
        return self._lived(made, own if beside is None else [*own, beside], beside, unlike)

    def _parameter_beside(self, own: torch.Tensor, name: str) -> torch.nn.Parameter | None:
        """Return the parameter beside the first one of the case, always the same one; None if it has none."""
        if not self._is("group", "parameter"):
            return None
        if id(own) not in self._beside:
            self._beside[id(own)] = own, self._new_parameter(own, name)
        return self._beside[id(own)][1]

    def _new_parameter(self, own: torch.Tensor, name: str) -> torch.nn.Parameter:
        shape = (3, 2) if own.dim() == 2 else (2,)
        dtype = own.dtype
        if self._is("dtype"):
            claimed = [getattr(torch, one) for one in ("float64", "float32") if one in self._impl.dtypes]
            others = [one for one in claimed if one != dtype]
            if not others:
                raise CannotRun("it has one dtype", name="dtype")
            dtype = others[0]
            self.built["dtype"] = None
        made = torch.nn.Parameter(_numbers(shape, 77).to(the_device(), dtype))
        setattr(made, MARK, True)
        layout = self._is("layout") and self._is("group")  # options of the own group may not fit it
        if self._is("frozen"):
            made.requires_grad_(False)
            self.built["frozen"] = None
        elif layout or name == "SparseAdam":
            zero = torch.zeros((1, *shape[1:]), dtype=dtype)
            made.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), zero, shape, check_invariants=True).to(
                the_device()
            )
            self.built |= {"layout": None} if layout else {}
        else:
            made.grad = torch.zeros_like(made, requires_grad=False)
        return made

    def _groups(self, params: Sequence[Any], beside: Any) -> Any:
        """Return parameters or groups, reordered and with the other parameter."""
        if self._is("order") and len(params) > 1:
            params = list(reversed(params))
            self.built["order"] = None
        if beside is None:
            return params
        own = [one if isinstance(one, dict) else {"params": [one]} for one in params]
        grouped = isinstance(params[0], dict)
        last = self._is("last")
        self.built |= {"last": None} if last else {}
        if self._is("parameter") and not grouped:
            self.built["parameter"] = None
            return [*params, beside] if last else [beside, *params]
        if not grouped:
            own = [{"params": list(params)}]
        self.built["group"] = None
        return [*own, {"params": [beside]}] if last else [{"params": [beside]}, *own]

    def _make_unlike(self, made: Any, beside: Any, options: Mapping[str, float]) -> None:
        """Give the group of the other parameter these options."""
        groups = _groups_of(made)
        for group in groups:
            if [id(param) for param in group["params"]] == [id(beside)] and len(groups) > 1:
                for name, value in options.items():
                    if isinstance(group.get(name), torch.Tensor):
                        group[name].fill_(value)  # some optimizers allow no number in its place
                    elif name in group:
                        group[name] = value
                if self._is("tensor-lr") and "lr" in group:
                    group["lr"] = torch.tensor(OPTIONS_BESIDE["lr"], device=the_device())
                    self.built["tensor-lr"] = None

    def _lived(self, made: Any, params: Iterable[Any], beside: Any, options: Mapping[str, float]) -> Any:
        """Return an optimizer as a copy that shares its parameters, or one that reloads after each step."""
        if self._is("copy"):
            made = copy.deepcopy(made, {id(param): param for param in params})
            self.built["copy"] = None
        if self._is("load") and not hasattr(made, "register_step_post_hook"):
            raise CannotRun("it has no hooks after a step", name="register_step_post_hook")
        if self._is("load"):
            made.register_step_post_hook(_reload)
            self.built["load"] = None
        if self._is("group") and beside is not None:
            self._with_groups.append((made, beside, options))
        return made

    def of_state(self, kind: Any, params: Any, state: Any, param_groups: Any) -> Any:
        """Make a keyed optimizer from state and groups, as the case sees it that has no other parameter."""
        given = isinstance(params, Mapping) and params and isinstance(state, Mapping)
        beside = self._parameter_beside(next(iter(params.values())), "") if given else None
        if beside is None or not isinstance(param_groups, list):
            return kind(params, state, param_groups)
        key, last = f"{BESIDE}_{next(iter(params))}", self._is("last")
        entry = {beside: {"moment": torch.ones_like(beside.detach()), "count": 2.0}} if state else {}
        own = next((one for one in param_groups if isinstance(one, Mapping)), None)
        options = {name: snapshot(one) for name, one in (own or {}).items() if name != "params"}
        groups = [{"params": [beside], **options}] if own is not None and self._is("group") else []
        self._note_beside("group" if groups else "parameter")
        order = (lambda own, new: own | new) if last else (lambda own, new: new | own)
        made = kind(
            order(dict(params), {key: beside}),
            order(dict(state), entry),
            [*param_groups, *groups] if last else [*groups, *param_groups],
        )
        self._make_unlike(made, beside, self._options)
        if self._is("nesting"):
            made = self._impl.OptimizerWrapper(made)
            self.built["nesting"] = None
        return WithHiddenParameter(made, key, beside, last)

    def _note_beside(self, dimension: str) -> None:
        self.built |= {dimension: None} | ({"last": None} if self._is("last") else {})

    def _fault_tolerant(self, kind: Any, *args: Any, **options: Any) -> Any:
        """Make a fault-tolerant optimizer around one of torch that has another group or parameter."""
        for inner in (*args, *options.values()):
            if type(inner).__module__.startswith("torch.optim.") and isinstance(inner, torch.optim.Optimizer):
                self._join(inner)
        return kind(*args, **options)

    def _join(self, inner: torch.optim.Optimizer) -> None:
        """Put the other parameter into an optimizer of torch without state."""
        listed = inner.param_groups[0]["params"]
        if inner.state or not listed or id(listed[0]) in self._beside:
            return
        beside = self._parameter_beside(listed[0], type(inner).__name__)
        if beside is None:
            return
        last = self._is("last")
        if self._is("group"):
            inner.add_param_group({"params": [beside]})
            if not last:
                inner.param_groups.insert(0, inner.param_groups.pop())
            self._make_unlike(inner, beside, self._options)
        else:
            listed.insert(len(listed) if last else 0, beside)
        self._note_beside("group" if self._is("group") else "parameter")

    def _in_backward(self, found: Any, *args: Any, **options: Any) -> Any:
        """Apply an optimizer to parameters and another one, or another optimizer to that one."""
        args, options = tuple(map(uncalled, args)), each(uncalled, options)
        kind, listed, given = args if len(args) == 3 else (None, None, None)
        if not isinstance(listed, list) or not isinstance(given, Mapping) or self._is("frozen"):
            return found(*args, **options)
        own = next((one for one in listed if isinstance(one, torch.nn.Parameter)), None)
        beside = None if own is None else self._parameter_beside(own, "")
        if beside is None:
            return found(*args, **options)
        beside.grad, last = None, self._is("last")
        self._unmoved.append(("a parameter without gradient", beside, beside.detach().clone()))
        self._note_beside("group" if self._is("group") else "parameter")
        if self._is("parameter"):
            return found(kind, [*listed, beside] if last else [beside, *listed], given)
        other = kind, [beside], {**given, **({"lr": self._options["lr"]} if "lr" in given else {})}
        calls = [args, other] if last else [other, args]
        return [found(*call) for call in calls][0 if last else 1]

    # --- embedding modules --------------------------------------------------------------------------

    def _tables(self, name: str, kind: Any, configs: Any, *args: Any, **options: Any) -> Any:
        """Make an embedding module with another table, or with another feature of its first table."""
        configs, args, options = list(configs), tuple(map(uncalled, args)), each(uncalled, options)
        if not configs or not self._is("table", "feature"):
            return kind(configs, *args, **options)
        if self._is("frozen") and self._impl.lacks(f"{name}.frozen_tables"):
            raise CannotRun(f"{name} trains every table", name=f"{name}.frozen_tables")
        first = configs[0]
        like = {
            "data_type": first.data_type,
            **({"pooling": first.pooling} if hasattr(first, "pooling") else {}),
        }
        config = getattr(self._impl, EMBEDDINGS[name])
        last = self._is("last")
        self.built |= {"last": None} if last else {}
        if self._is("table"):
            other = config(
                num_embeddings=3,
                embedding_dim=first.embedding_dim + 4,
                name=BESIDE,
                feature_names=[BESIDE],
                **like,
            )
            configs = [*configs, other] if last else [other, *configs]
            rows = [0, 2, 2]
            self.built["table"] = None
        else:
            names = [*first.feature_names, BESIDE] if last else [BESIDE, *first.feature_names]
            again = dict(vars(first), feature_names=names)
            configs[0] = type(first)(**again)
            rows = []
            self.built["feature"] = None
        made = kind(configs, *args, **options)
        if self._is("frozen") and self._is("table"):
            table = made.fused_optimizer.params[f"{BESIDE}.weight"]
            table.requires_grad_(False)
            self._unmoved.append(("a frozen table", table, table.detach().clone()))
            self.built["frozen"] = None
        made.register_forward_pre_hook(functools.partial(_with_feature, rows), with_kwargs=True)
        made.register_forward_hook(_without_feature)
        return made


def _groups_of(optimizer: Any) -> Sequence[Any]:
    """Return the groups of an optimizer; a class that only has its methods may have none, or tuples."""
    return [group for group in getattr(optimizer, "param_groups", ()) if isinstance(group, Mapping)]


def _is_entry(one: Any) -> bool:
    return isinstance(one, torch.Tensor) or (isinstance(one, dict) and "params" in one)


def _is_sparse(factory: Any) -> bool:
    return getattr(factory, "func", factory) is torch.optim.SparseAdam


def _reload(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Load what the optimizer saves."""
    optimizer.load_state_dict(snapshot(optimizer.state_dict()))


def _with_feature(rows: Sequence[int], module: Any, args: Any, options: Any) -> Any:
    """Add the other feature to the input of an embedding module: these rows in the first bag."""
    if not args or not isinstance(args[0], dict) or not args[0]:
        return None
    values, offsets, *weights = next(iter(args[0].values()))
    if len(offsets) < 2:
        rows = []
    ends = [0, *[len(rows)] * (len(offsets) - 1)]
    made = [torch.tensor(rows, dtype=values.dtype), torch.tensor(ends, dtype=offsets.dtype)]
    made += [torch.ones(len(rows), dtype=one.dtype) for one in weights]
    return ({**args[0], BESIDE: tuple(one.to(values.device) for one in made)}, *args[1:]), options


def _without_feature(module: Any, args: Any, outputs: Any) -> Any:
    """Drop the output of the other feature, and give it a gradient of its own."""
    if not isinstance(outputs, dict) or BESIDE not in outputs:
        return None
    other = outputs[BESIDE]
    kept = {name: output for name, output in outputs.items() if name != BESIDE}
    if torch.is_grad_enabled() and other.requires_grad and kept:
        name = next(iter(kept))
        kept[name] = _Pulled.apply(kept[name], other)
    return kept


def in_situation(case: Any, impl: Any, situation: str) -> Any:
    """Call a case with the public names of an implementation in a situation, as scripts do."""
    made = among(impl, situation)
    seen = case(made)
    made.check()
    return seen


def among(impl: Any, situation: str) -> Any:
    """Return the public names of an implementation in a situation, unchanged if the situation is empty."""
    return Situated(impl, situation) if situation else impl


def of_state(impl: Any, kind: Any, params: Any, state: Any, param_groups: Any) -> Any:
    """Make a keyed optimizer of a class of the case, in the situation of the public names."""
    if isinstance(impl, Situated):
        return impl.of_state(kind, params, state, param_groups)
    return kind(params, state, param_groups)
