"""Tensor subclasses for weights, as quantization libraries have them, with the extension points of sharding."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def randn(*shape, key):
    """Normal numbers that are equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key), device="cpu")


class Wrapper(torch.Tensor):
    """A tensor whose values are in the tensors ``inner`` names; functions in ``by_row`` are applied to each of them."""

    inner = ()
    by_row = (aten.detach, aten.split, aten.slice, aten.new_zeros, aten.clone, aten._to_copy, aten.empty_like)

    def __new__(cls, *inner, dtype=torch.float32, shape=None):
        shape = inner[0].shape if shape is None else shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=inner[0].device)

    def __init__(self, *inner, dtype=torch.float32, shape=None):
        for name, tensor in zip(self.inner, inner, strict=True):
            setattr(self, name, tensor)

    def parts(self):
        return [getattr(self, name) for name in self.inner]

    def of(self, parts):
        """The same kind of tensor made of other inner tensors."""
        return type(self)(*parts, dtype=self.dtype)

    def __tensor_flatten__(self):
        return list(self.inner), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, _size, _stride):
        return cls(*[inner[name] for name in cls.inner], dtype=dtype)

    def __repr__(self, **_):
        return f"{type(self).__name__}({self.whole()})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        own = args[0]
        packet = func.overloadpacket
        if packet is aten.copy_ and isinstance(args[1], cls):
            for mine, theirs in zip(own.parts(), args[1].parts(), strict=True):
                mine.copy_(theirs)
            return own
        if packet is aten.new_zeros:
            return own.of([part.new_zeros((args[1][0], *part.shape[1:]), **kwargs) for part in own.parts()])
        if packet is aten.view:  # torch's fully_shard keeps a flat view, but only looks at its class
            return own.of(own.parts())
        if packet is aten.as_strided:
            return own.of([part[: args[1][0]] for part in own.parts()])
        if packet in cls.by_row:
            results = [func(part, *args[1:], **kwargs) for part in own.parts()]
            return [own.of(parts) for parts in zip(*results, strict=True)] if packet is aten.split else own.of(results)
        plain = pytree.tree_map_only(Wrapper, lambda tensor: tensor.whole(), (args, kwargs))
        result = func(*plain[0], **plain[1])
        if func._schema.name.endswith("_"):  # written in place: quantize again
            for mine, theirs in zip(own.parts(), own.made_of(result), strict=True):
                mine.copy_(theirs)
            return own
        return result


def padded(part, outer_size, mesh):
    """``part`` with as many rows as the first rank has."""
    missing = -(-outer_size[0] // mesh.size()) - part.size(0)
    return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part


class Int8Rows(Wrapper):
    """Rows of int8, with one scale each. It is gathered as it is, and computes by multiplying the scale."""

    inner = ("values", "scale")

    @staticmethod
    def made_of(whole):
        scale = whole.abs().amax(1).clamp(min=1e-9) / 127
        return (whole / scale[:, None]).round().to(torch.int8), scale

    @classmethod
    def quantized(cls, whole):
        return cls(*cls.made_of(whole), dtype=whole.dtype)

    def whole(self):
        return (self.values * self.scale[:, None]).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and isinstance(args[1], cls):
            return _Linear.apply(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Linear)
        assert len(outer_stride) == len(outer_size) == 2
        return tuple(padded(part, outer_size, mesh) for part in self.parts()), mp_policy.param_dtype

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata in (None, param_dtype)
        if out is None:
            return Int8Rows(*outputs, dtype=param_dtype), outputs
        for mine, theirs in zip(out.parts(), outputs, strict=True):
            assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.whole(), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.whole(), grad.flatten(0, -2).T @ x.flatten(0, -2), grad.flatten(0, -2).sum(0)


class Packed4(Wrapper):
    """Two values of four bits in each byte, and a scale for the whole; computes as a plain tensor made of them."""

    inner = ("values",)

    def __new__(cls, data, dtype=torch.float32, shape=None):
        return super().__new__(cls, data, dtype=dtype, shape=(data.size(0), data.size(1) * 2))

    @staticmethod
    def made_of(whole):
        codes = (whole * 16).round().clamp(-8, 7).add(8).to(torch.uint8)
        return (codes[:, ::2] * 16 + codes[:, 1::2],)

    @classmethod
    def quantized(cls, whole):
        return cls(*cls.made_of(whole), dtype=whole.dtype)

    @staticmethod
    def unpacked(data, dtype):
        return (torch.stack([data // 16, data % 16], dim=-1).flatten(1).to(dtype) - 8) / 16

    def whole(self):
        return self.unpacked(self.values, self.dtype)

    def fsdp_pre_all_gather(self, mesh):
        return (self.values,), self.values.size(1)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (data,) = outputs
        assert data.size(1) == metadata
        whole = self.unpacked(data, param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Half(Wrapper):
    """Values that are gathered in the compute dtype, with padding."""

    inner = ("values",)
    by_row = (*Wrapper.by_row, aten.zeros_like, aten.mul, aten.add)

    @staticmethod
    def made_of(whole):
        return (whole,)

    @classmethod
    def quantized(cls, whole):
        return cls(whole, dtype=whole.dtype)

    def whole(self):
        return self.values

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (padded(self.values, outer_size, mesh).to(mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (data,) = outputs
        return (data, outputs) if out is None else None


class Block(nn.Module):
    """A trained int8 weight, a packed one that is frozen, one gathered in low precision, and plain parameters."""

    def __init__(self, rows, width, seed, kinds=(Int8Rows, Packed4, Half)):
        super().__init__()
        self.layers = nn.ModuleList()
        for index, kind in enumerate(kinds):
            layer = nn.Linear(width, rows)
            with torch.no_grad():
                layer.weight.copy_(randn(rows, width, key=seed * 10 + index) / width**0.5)
                layer.bias.copy_(randn(rows, key=seed * 10 + index + 5) / 10)
            layer.weight = nn.Parameter(kind.quantized(layer.weight.detach()), requires_grad=kind is not Packed4)
            layer.back = nn.Linear(rows, width, bias=False)
            with torch.no_grad():
                layer.back.weight.copy_(randn(width, rows, key=seed * 10 + index + 7) / rows**0.5)
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer.back(F.gelu(layer(x)))
        return x


class Net(nn.Module):
    """Two blocks of ``rows`` and ``width``, and a head."""

    def __init__(self, rows=6, width=8, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows, width, seed, **kwargs) for seed in (1, 2))
        self.head = nn.Linear(width, 2)
        with torch.no_grad():
            self.head.weight.copy_(randn(2, width, key=90))
            self.head.bias.zero_()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
