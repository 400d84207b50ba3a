"""Runs the differentiable operators of PyTorch's own operator database through the access hook.

    python sweep.py LIBRARY [--tenth | --only NAME...]

LIBRARY is fsdp_operator_sweep (sweep_library.cpp). Each sample of an entry is run plainly and sharded: every dense tensor among its
arguments is then a unit of its own, of which this process owns half, and which is freed and overwritten after every operator, in forward
and in backward. Values, gradients and gradients of gradients must be the same bit by bit; so must values without gradients, in an
`out=` argument and of the in-place form (on a copy: writing to a parameter is refused). Every second sample has its dimensions in
another order in memory. All entries are run in float32, complex64 and bfloat16 as far as they know them; with --tenth every tenth is
run, by name, on fewer samples and in one dtype.

What is not compared, or not in full, stands with its reason in exceptions.txt. An exception that is not listed there fails the sweep, as
does any difference or crash, and (when all entries are run) a line there that is no longer needed.

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
LONGEST = 300  # seconds that one entry may take
PLAIN_RUNS = 50  # that must be alike before another value of the sharded run counts as a difference


# ---- in the process that runs entries


class NotCompared(Exception):
    """Why a sample or an entry is not compared; `kind` is what exceptions.txt lists."""

    def __init__(self, kind, detail=""):
        super().__init__(detail)
        self.kind = kind


class Difference(Exception):
    """`kind` tells rounding from values that have nothing to do with each other; either fails the sweep."""

    def __init__(self, detail, kind="different"):
        super().__init__(detail)
        self.kind = kind


def full_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtypes_of(op):
    import torch

    both = op.supported_backward_dtypes("cpu") & op.supported_dtypes("cpu")
    found = [dtype for dtype in (torch.float32, torch.complex64, torch.bfloat16, torch.float64) if dtype in both]
    if not found:
        raise NotCompared("no dtype", "no floating dtype with a backward on CPU")
    return found[:3]


def tensors_in(tree):
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_dense(tensor):
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def copy_of(tensor, permuted):
    import torch

    with torch.no_grad():
        copied = tensor.detach()
        if is_dense(tensor):
            copied = copied.resolve_conj().resolve_neg()
            if permuted and copied.dim() > 1:
                copied = copied.transpose(0, -1).contiguous().transpose(0, -1)
        copied = copied.clone()
    return copied.requires_grad_(tensor.requires_grad)


def chosen_samples(op, dtype, count):
    """Samples with something to differentiate, spread over the first of what the database offers."""
    import torch

    torch.manual_seed(0)
    found = [
        sample
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), 2 * count + 20)
        if any(tensor.requires_grad and is_dense(tensor) for tensor in tensors_in((sample.input, sample.args, sample.kwargs)))
    ]
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


class Call:
    """One call of an operator on copies of a sample's tensors, plain or sharded."""

    def __init__(self, op, sample, permuted, shard_buffers=True):
        import torch
        from torch.utils._pytree import tree_map

        copies = {}

        def copy(leaf):
            if isinstance(leaf, torch.Generator):
                leaf.manual_seed(0)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_of(leaf, permuted)
            return copies[id(leaf)]

        self.op, self.sample = op, sample
        self.arguments = tree_map(copy, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        dense = [tensor for tensor in copies.values() if is_dense(tensor)]
        self.parameters = [tensor for tensor in dense if tensor.requires_grad or shard_buffers]
        self.trained = [i for i, tensor in enumerate(self.parameters) if tensor.requires_grad]

    def call(self, operator, **more):
        import torch

        torch.manual_seed(1)
        first, args, kwargs = self.arguments
        return operator(first, *args, **kwargs, **more)

    def forward(self, returned):
        result = self.call(self.op)
        if self.sample.output_process_fn_grad:
            result = self.sample.output_process_fn_grad(result)
        self.outputs = [returned(out) for out in tensors_in(result)]
        self.differentiable = [out for out in self.outputs if out.requires_grad]

    def without_gradients(self, returned):
        """Values of the forms that need no gradients; None where the operator throws in that form."""
        import torch

        found = []
        with torch.no_grad():
            result = self.call(self.op)
            found.append([returned(out).clone() for out in tensors_in(result)])
            forms = []
            if self.op.supports_out and isinstance(result, torch.Tensor):
                forms.append(lambda: self.call(self.op, out=torch.zeros_like(result)))
            if self.op.inplace_variant and isinstance(self.arguments[0], torch.Tensor):
                forms.append(lambda: self.call(lambda first, *args, **kwargs: self.op.inplace_variant(first.clone(), *args, **kwargs)))
            for form in forms:
                try:
                    found.append([out.clone() for out in tensors_in(form())])
                except RuntimeError:
                    found.append(None)
        return found

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


# What compares, in this order.
FORMS = "value without gradients"
RESULTS = ("value", "gradient", "gradient by autograd.grad", "second-order gradient", FORMS)


def run(call, second_order, bracket=lambda forward: forward(), returned=lambda tensor: tensor, gradient=None):
    def gradients():
        found = [gradient(i) if gradient else halved_and_doubled(call.parameters[i].grad) for i in call.trained]
        for i in call.trained:
            call.parameters[i].grad = None
        return [value if value is None else value.clone() for value in found]

    result = dict.fromkeys(RESULTS, ())
    bracket(lambda: call.forward(returned))
    result["value"] = call.values()
    if call.differentiable:
        call.backward(retain_graph=second_order)
        result["gradient"] = gradients()
        if second_order:
            result["gradient by autograd.grad"], further = call.second_order()
            result["second-order gradient"] = gradients() if further else []
    bracket(lambda: result.update({FORMS: call.without_gradients(returned)}))
    return result


def halved_and_doubled(gradient):
    """As two ranks average it: the same unless it is one of the smallest numbers there are."""
    import torch

    if gradient is None:
        return None
    gradient = gradient.detach()
    parts = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() and is_dense(gradient) else gradient
    doubled = parts / 2 + parts / 2
    return torch.view_as_complex(doubled) if parts is not gradient else doubled


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


def compare(expected, actual, what):
    """Throws Difference. Both are nested lists and tuples of tensors, None, and what compares by itself."""
    import torch

    if expected is None and what.startswith(FORMS):
        return  # the plain run throws; whether a shape is refused is up to the operator
    if isinstance(expected, (list, tuple)):
        if actual is None or len(expected) != len(actual):
            raise Difference(f"{what}: {'an error' if actual is None else len(actual)} instead of {len(expected)}")
        for i, (x, y) in enumerate(zip(expected, actual)):
            compare(x, y, f"{what} {i}")
    elif not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor) or expected != actual:
            raise Difference(f"{what}: {describe(actual)} instead of {describe(expected)}")
    elif not same(expected, actual):
        detail, kind = f"{describe(actual)} instead of {describe(expected)}", "different"
        if expected.shape == actual.shape and (expected.is_floating_point() or expected.is_complex()):
            detail = f"off by up to {(expected.to_dense() - actual.to_dense()).abs().max().item():.3g}"
            tolerance = 1000 * torch.finfo(expected.dtype).eps
            if torch.allclose(expected.to_dense(), actual.to_dense(), tolerance, tolerance, equal_nan=True):
                kind = "last digits"
        raise Difference(f"{what}: {detail}", kind)


def describe(value):
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if hasattr(value, "dtype") else repr(value)


def compare_results(expected, actual):
    for what in RESULTS:
        compare(expected[what], actual[what], what)


def run_sharded(op, sample, permuted, second_order, shard_buffers):
    """(results, what was counted)"""
    import torch

    library = torch.ops.fsdp_test
    call = Call(op, sample, permuted, shard_buffers)

    def bracket(forward):
        library.enter()
        try:
            forward()
        finally:
            library.leave()

    library.shard(call.parameters)
    library.strict(True)
    try:
        result = run(call, second_order, bracket, library.returned, library.gradient)
        return result, {"parameters": len(call.parameters), "gathers": library.gathers(), "frees": library.frees()}
    finally:
        library.strict(False)
        library.drop()


def run_plain(op, sample, permuted):
    """(results, with the dimensions reordered?, to second order?): as much as the operator can do."""
    forms = [(permuted, op.supports_gradgrad), (permuted, False), (False, op.supports_gradgrad), (False, False)]
    for form in dict.fromkeys(forms):
        try:
            return run(Call(op, sample, form[0]), form[1]), *form
        except Exception as error:  # noqa: BLE001: what it throws is the operator's business
            failure = str(error).split("\n")[0]
    raise NotCompared("plain run fails", failure)


def check_reproducible(op, sample, permuted, second_order, plain):
    """Throws NotCompared where plain runs differ among themselves."""
    import torch

    held = []
    for i in range(PLAIN_RUNS):
        held.append(torch.full((1 + 37 * i,), float("nan")))  # so that memory comes from another place each time
        # The last run gets memory that is filled: some operators read what they have not written.
        torch.use_deterministic_algorithms(i == PLAIN_RUNS - 1, warn_only=True)
        try:
            compare_results(plain, run(Call(op, sample, permuted), second_order))
        except Difference as difference:
            raise NotCompared("not reproducible", f"plain runs differ among themselves: {difference}") from None
        finally:
            torch.use_deterministic_algorithms(False)


def run_sample(op, sample, permuted, counts):
    plain, permuted, second_order = run_plain(op, sample, permuted)
    try:
        sharded, counted = run_sharded(op, sample, permuted, second_order, True)
    except RuntimeError as error:
        if "writes to parameter" not in str(error):
            raise
        # Statistics that the operator updates: buffers in a model, which are not sharded.
        sharded, counted = run_sharded(op, sample, permuted, second_order, False)
        counted["with buffers"] = 1
    try:
        compare_results(plain, sharded)
    except Difference:
        check_reproducible(op, sample, permuted, second_order, plain)
        raise
    counted.update({"calls": 1, "second order": int(second_order), "permuted": int(permuted)})
    for key, value in counted.items():
        counts[key] = counts.get(key, 0) + value


# Errors in which the library refuses, by their text.
REFUSALS = ("cannot enter a flat gradient buffer", "are not gathered now", "writes to parameter", "would give parameter")


def run_entry(op, tenth):
    counts, exceptions = {}, {}  # of exceptions the first detail of each kind
    try:
        for dtype in dtypes_of(op)[: 1 if tenth else None]:
            for i, sample in enumerate(chosen_samples(op, dtype, 5 if tenth else 40)):
                detail = f"{dtype}, sample {i}: ".replace("torch.", "")
                try:
                    run_sample(op, sample, i % 2 == 1, counts)
                except Difference as difference:
                    exceptions.setdefault(difference.kind, f"{detail}{difference}")
                except NotCompared as exception:
                    exceptions.setdefault(exception.kind, f"{detail}{exception}")
                except Exception as error:  # noqa: BLE001
                    text = str(error).split("\n")[0]
                    kind = next((f"refused: {refusal}" for refusal in REFUSALS if refusal in text), "fails")
                    exceptions.setdefault(kind, f"{detail}{type(error).__name__}: {text}")
        if not counts and not exceptions:
            raise NotCompared("no sample", "no sample has a dense tensor that requires a gradient")
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
        say({"end": name, **run_entry(differentiable[name], tenth)})


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
        command = [sys.executable, os.path.abspath(__file__), library, "--worker", *selection, *(["--only", *left] if left else [])]
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
    needless = {} if arguments.tenth or arguments.only else set(listed) - seen
    stale = sorted((name, kind) for name, kind in needless if kind not in ("not reproducible", "last digits"))  # chance shows them

    total = {}
    for result in results.values():
        for key, value in result["counts"].items():
            total[key] = total.get(key, 0) + value
    compared = sum(1 for result in results.values() if result["counts"])
    equal = sum(1 for result in results.values() if not result["exceptions"])
    if explained:
        print("not compared, or not in full, with the reason listed in exceptions.txt:", *explained, sep="\n")
    if unexplained:
        print("NOT AS EXPECTED:", *unexplained, sep="\n")
    if stale:
        print("LISTED in exceptions.txt, but no longer so:", *(f"  {name} | {kind}" for name, kind in stale), sep="\n")
    print(
        f"{len(results)} of {known} differentiable entries: {compared} compared, {equal} without exception; "
        + ", ".join(f"{value} {key}" for key, value in total.items())
        + f"; {time.monotonic() - began:.0f} s"
    )
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
