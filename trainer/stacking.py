"""Queries, keys and values from one product: the narrow products of a compiled layer, stacked.

    x ─┬─ q            x ── [q; k; v] ─┬─ q
       ├─ k     ─▶                     ├─ k
       └─ v                            └─ v

Few heads of keys make products too small to fill a GPU, and going back each of them writes a
gradient of x that has to be added to the others'. The weights stay what they are: they are laid
together in the graph, for each forward anew, which costs a hundredth of what it saves.
"""

from __future__ import annotations

from collections import defaultdict
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node


def stack_products(module: GraphModule) -> None:
    """Make one product of those that share an input and are not wider than it."""
    groups: dict[tuple, list[Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch._C._nn.linear and _narrow(node):
            x, weight = node.args[:2]
            value = weight.meta["example_value"]
            groups[x, value.dtype, value.requires_grad].append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _stack(module, nodes)
    module.graph.lint()
    module.recompile()


def _narrow(node: Node) -> bool:
    """A plain product with a parameter that has no more rows than columns."""
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(weight, Node) or weight.op != "placeholder" or bias is not None:
        return False
    rows, columns = weight.meta["example_value"].shape
    return rows <= columns


def _stack(module: GraphModule, nodes: list[Node]) -> None:
    weights: list[Any] = [node.args[1] for node in nodes]
    sizes = [weight.meta["example_value"].shape[0] for weight in weights]
    with module.graph.inserting_before(nodes[0]):
        stacked = module.graph.call_function(torch.cat, (weights,))
        product = module.graph.call_function(torch._C._nn.linear, (nodes[0].args[0], stacked))
        parts = module.graph.call_function(torch.split, (product, sizes, -1))
        for number, node in enumerate(nodes):
            part = module.graph.call_function(getitem, (parts, number))
            node.replace_all_uses_with(part)
    for node in nodes:
        module.graph.erase_node(node)
