"""Runs the differentiable operators of PyTorch's own operator database through the access hook.

    python sweep.py LIBRARY [--tenth | --only NAME...]

LIBRARY is fsdp_operator_sweep (sweep_library.cpp). Each sample of an entry is run plainly and sharded: every dense tensor among its
arguments is then a unit of its own, of which this process owns half, and which is freed and overwritten after every operator, in forward
and in backward. Values, gradients and gradients of gradients must be the same bit by bit.

What is not run, or not in full, stands with its reason in exceptions.txt. An exception that is not listed there fails the sweep, as does
any difference or crash, and (when all entries are run) a line there that is no longer needed.

Entries are run in a process of their own, so that one that dies or hangs is named and the others go on.
"""

import argparse
import itertools
import json
import os
import select
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
LONGEST = 300  # seconds for one entry
SAMPLES = 5  # of each entry, spread over the first LOOKED_AT
LOOKED_AT = 60


# ---- in the process that runs entries


class NotCompared(Exception):
    """Why a sample or an entry is not compared; `kind` is what exceptions.txt lists."""

    def __init__(self, kind, detail=""):
        super().__init__(detail)
        self.kind = kind


class Difference(Exception):
    pass


def full_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_for(op):
    import torch

    for dtype in (torch.float32, torch.complex64, torch.bfloat16, torch.float64):
        if dtype in op.supported_backward_dtypes("cpu") and dtype in op.supported_dtypes("cpu"):
            return dtype
    raise NotCompared("dtype", "no floating dtype with a backward on CPU")


def tensors_in(tree):
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_dense(tensor):
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def copy_of(tensor):
    import torch

    with torch.no_grad():
        copied = tensor.detach()
        if is_dense(tensor):
            copied = copied.resolve_conj().resolve_neg()
        copied = copied.clone()
    return copied.requires_grad_(tensor.requires_grad)


def chosen_samples(op, dtype):
    """Samples with something to differentiate, spread over what the database offers."""
    import torch

    torch.manual_seed(0)
    found = [
        sample
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), LOOKED_AT)
        if any(tensor.requires_grad and is_dense(tensor) for tensor in tensors_in((sample.input, sample.args, sample.kwargs)))
    ]
    if not found:
        raise NotCompared("no sample", "no sample has a dense tensor that requires a gradient")
    count = min(SAMPLES, len(found))
    return [found[i * len(found) // count] for i in range(count)]


class Call:
    """One call of an operator on copies of a sample's tensors, plain or sharded."""

    def __init__(self, op, sample, shard_buffers):
        import torch
        from torch.utils._pytree import tree_map

        copies = {}

        def copy(leaf):
            if isinstance(leaf, torch.Generator):
                leaf.manual_seed(0)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_of(leaf)
            return copies[id(leaf)]

        self.op, self.sample = op, sample
        self.arguments = tree_map(copy, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        dense = [tensor for tensor in copies.values() if is_dense(tensor)]
        self.parameters = [tensor for tensor in dense if tensor.requires_grad or shard_buffers]
        self.trained = [i for i, tensor in enumerate(self.parameters) if tensor.requires_grad]

    def forward(self):
        import torch

        torch.manual_seed(1)
        first, args, kwargs = self.arguments
        result = self.op(first, *args, **kwargs)
        if self.sample.output_process_fn_grad:
            result = self.sample.output_process_fn_grad(result)
        self.outputs = tensors_in(result)
        self.differentiable = [out for out in self.outputs if out.requires_grad]

    def values(self):
        return [(out.requires_grad, out.detach().clone()) for out in self.outputs]

    def seeds(self, outputs):
        import torch

        torch.manual_seed(2)
        return [torch.randn(out.shape, dtype=out.dtype) for out in outputs]

    def backward(self, retain_graph):
        import torch

        torch.autograd.backward(self.differentiable, self.seeds(self.differentiable), retain_graph=retain_graph)

    def second_order(self):
        """Gradients with a graph of their own, and a backward through that."""
        import torch

        inputs = [self.parameters[i] for i in self.trained]
        first = torch.autograd.grad(self.differentiable, inputs, self.seeds(self.differentiable), create_graph=True, allow_unused=True)
        values = [gradient if gradient is None else gradient.detach().clone() for gradient in first]
        further = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        if further:
            torch.autograd.backward(further, self.seeds(further))
        return values, bool(further)


def run(call, second_order, bracket=lambda forward: forward(), gradient=None):
    """(values, gradients, first-order gradients of autograd.grad, gradients of those)"""
    gradient = gradient or (lambda i: call.parameters[i].grad)

    def gradients():
        found = [gradient(i) for i in call.trained]
        for i in call.trained:
            call.parameters[i].grad = None
        return [value if value is None else value.clone() for value in found]

    bracket(call.forward)
    result = [call.values(), [], [], []]
    if call.differentiable:
        call.backward(retain_graph=second_order)
        result[1] = gradients()
        if second_order:
            result[2], further = call.second_order()
            result[3] = gradients() if further else []
    return result


def same(a, b):
    import torch

    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout == torch.strided:
        a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
        if a.is_quantized:
            return torch.equal(a, b)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return same(a.to_dense(), b.to_dense())


def compare(plain, sharded):
    names = ("value", "gradient", "gradient by autograd.grad", "second-order gradient")
    for name, a, b in zip(names, plain, sharded):
        if len(a) != len(b):
            raise Difference(f"{name}: {len(b)} instead of {len(a)}")
        for i, (x, y) in enumerate(zip(a, b)):
            if name == "value":
                (x_requires_grad, x), (y_requires_grad, y) = x, y
                if x_requires_grad != y_requires_grad:
                    raise Difference(f"value {i}: requires_grad is {y_requires_grad} instead of {x_requires_grad}")
            if (x is None) != (y is None):
                raise Difference(f"{name} {i}: {'none' if y is None else 'one'} instead of {'none' if x is None else 'one'}")
            if x is not None and not same(x, y):
                detail = f"shape {tuple(y.shape)} instead of {tuple(x.shape)}"
                if x.shape == y.shape and x.dtype.is_floating_point | x.dtype.is_complex:
                    detail = f"off by up to {(x.to_dense() - y.to_dense()).abs().max().item():.3g}"
                raise Difference(f"{name} {i}: {detail}")


def run_sharded(op, sample, second_order, shard_buffers):
    import torch

    library = torch.ops.fsdp_test
    call = Call(op, sample, shard_buffers)

    def bracket(forward):
        library.enter()
        try:
            forward()
        finally:
            library.leave()

    library.shard(call.parameters)
    library.strict(True)
    try:
        result = run(call, second_order, bracket, library.gradient)
        return result, library.gathers(), library.frees(), len(call.parameters)
    finally:
        library.strict(False)
        library.drop()


def run_sample(op, sample, counts):
    second_order = op.supports_gradgrad
    try:
        call = Call(op, sample, True)
        plain = run(call, second_order)
    except Exception as error:  # noqa: BLE001: what it throws is the operator's business
        if not second_order:
            raise NotCompared("plain run fails", str(error)) from error
        second_order = False
        try:
            plain = run(Call(op, sample, True), False)
        except Exception as error:  # noqa: BLE001
            raise NotCompared("plain run fails", str(error)) from error
    try:
        compare(plain, run(Call(op, sample, True), second_order))
    except Difference as difference:
        raise NotCompared("not reproducible", str(difference)) from difference
    try:
        sharded, gathers, frees, parameters = run_sharded(op, sample, second_order, True)
    except RuntimeError as error:
        if "writes to parameter" not in str(error):
            raise
        # Statistics that the operator updates: buffers in a model, which are not sharded.
        sharded, gathers, frees, parameters = run_sharded(op, sample, second_order, False)
        counts["buffers"] += 1
    compare(plain, sharded)
    counts["samples"] += 1
    counts["second order"] += second_order
    counts["gathers"] += gathers
    counts["frees"] += frees
    counts["parameters"] += parameters


# Errors in which the library refuses, by their text.
REFUSALS = ("cannot enter a flat gradient buffer", "are not gathered now", "writes to parameter", "would give parameter")


def run_entry(op):
    counts = dict.fromkeys(("samples", "second order", "gathers", "frees", "parameters", "buffers"), 0)
    exceptions = {}  # kind: the first detail
    try:
        for sample in chosen_samples(op, dtype_for(op)):
            try:
                run_sample(op, sample, counts)
            except Difference as difference:
                exceptions.setdefault("different", str(difference))
            except NotCompared as exception:
                exceptions.setdefault(exception.kind, str(exception))
            except Exception as error:  # noqa: BLE001
                text = str(error).split("\n")[0]
                kind = next((f"refused: {refusal}" for refusal in REFUSALS if refusal in text), "fails")
                exceptions.setdefault(kind, f"{type(error).__name__}: {text}")
    except NotCompared as exception:
        exceptions.setdefault(exception.kind, str(exception))
    return {"counts": counts, "exceptions": exceptions}


def work(library, only, tenth):
    import warnings

    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.ops.load_library(library)
    differentiable = {full_name(op): op for op in op_db if op.supports_autograd}
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what operators print is no message to the parent
    say = lambda message: print(json.dumps(message), file=out, flush=True)  # noqa: E731
    known = sorted(differentiable)
    names = only or (known[::10] if tenth else known)
    say({"names": names, "known": len(known)})
    for name in names:
        say({"begin": name})
        say({"end": name, **run_entry(differentiable[name])})


# ---- in the process that was started


def messages_of(process):
    """Each message of the process; ends when it does. Ends a process that says nothing for too long."""
    while select.select([process.stdout], [], [], LONGEST)[0]:
        line = process.stdout.readline()
        if not line:
            break
        yield json.loads(line)
    else:
        process.kill()
    process.wait()


def run_all(library, selection):
    """({entry: result}, how many differentiable entries there are)"""
    results, left, known = {}, None, 0
    while left is None or left:
        command = [sys.executable, os.path.abspath(__file__), library, "--worker", *(["--only", *left] if left else selection)]
        # Line by line and unbuffered: select() must not miss what a buffer holds.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        running = None
        for message in messages_of(process):
            if "names" in message:
                left, known = list(message["names"]), message["known"]
            elif "begin" in message:
                running = message["begin"]
            else:
                results[message["end"]] = message
                left.remove(message["end"])
                running = None
        if running:
            results[running] = {"counts": {}, "exceptions": {"crash": f"the process ended with {process.returncode}"}}
            left.remove(running)
        elif left is None or left:
            sys.exit(f"sweep: the process that runs the entries ended with {process.returncode}")
    return results, known


def read_listed():
    """{(entry, kind): reason} from lines 'entry | kind | reason'."""
    listed = {}
    with open(f"{HERE}/exceptions.txt") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                entry, kind, reason = (part.strip() for part in line.split("|"))
                listed[entry, kind] = reason
    return listed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--tenth", action="store_true", help="every tenth entry, by name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these entries")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.library, arguments.only, arguments.tenth)
        return 0

    began = time.monotonic()
    selection = ["--only", *arguments.only] if arguments.only else ["--tenth"] if arguments.tenth else []
    results, known = run_all(arguments.library, selection)

    listed = read_listed()
    unexplained, explained = [], []
    for name, result in sorted(results.items()):
        for kind, detail in result["exceptions"].items():
            reason = listed.get((name, kind))
            if reason:
                explained.append(f"  {name} | {kind} | {reason}")
            else:
                unexplained.append(f"  {name} | {kind} | {detail}")
    seen = {(name, kind) for name, result in results.items() for kind in result["exceptions"]}
    stale = [] if arguments.tenth or arguments.only else sorted(set(listed) - seen)

    total = {}
    for result in results.values():
        for key, value in result["counts"].items():
            total[key] = total.get(key, 0) + value
    compared = sum(1 for result in results.values() if result["counts"].get("samples"))
    equal = sum(1 for result in results.values() if not result["exceptions"])
    if explained:
        print("not compared, or not in full, with the reason listed in exceptions.txt:", *explained, sep="\n")
    if unexplained:
        print("NOT AS EXPECTED:", *unexplained, sep="\n")
    if stale:
        print("LISTED in exceptions.txt, but no longer so:", *(f"  {name} | {kind}" for name, kind in stale), sep="\n")
    print(
        f"{len(results)} of {known} differentiable entries: {compared} compared, {equal} of them in full; "
        f"{total.get('samples', 0)} calls, {total.get('second order', 0)} to second order, {total.get('parameters', 0)} parameters, "
        f"{total.get('gathers', 0)} gathers, {total.get('frees', 0)} frees; {time.monotonic() - began:.0f} s"
    )
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
