"""Checks what the scripts work out for themselves, without the network: python3 check_scripts.py ROOT"""

import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, f"{ROOT}/scripts/lib")
sys.dont_write_bytecode = True
import bench  # noqa: E402
import fetch_debs  # noqa: E402
import tally  # noqa: E402


def script(name, *arguments, **kwargs):
    return subprocess.run(["bash", f"{ROOT}/scripts/{name}", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


class Scripts(unittest.TestCase):
    def test_each_has_its_run_bit_and_help(self):
        names = [name for name in os.listdir(f"{ROOT}/scripts") if os.path.isfile(f"{ROOT}/scripts/{name}")]
        self.assertIn("setup", names)
        for name in names:
            with self.subTest(name):
                self.assertTrue(os.access(f"{ROOT}/scripts/{name}", os.X_OK))
                result = script(name, "--help")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn(f"scripts/{name}", result.stdout)

    def test_mistaken_arguments_are_named_before_anything_is_done(self):
        for arguments, text in (
            (["setup", "--fast"], "'--fast'"),
            (["setup", "--libtorch"], "--libtorch wants a value"),
            (["setup", "--libtorch", "/no/such"], "no LibTorch in '/no/such'"),
            (["test", "--slow"], "'--slow'"),
            (["test", "--quick", "--stress"], "--quick and --stress exclude each other"),
            (["bench", "--slow"], "'--slow'"),
            (["bench", "--ranks", "two"], "--ranks is 'two'"),
            (["bench", "--ranks", "1"], "--ranks is '1'"),
            (["bench", "--out", "/no/such/file.json"], "a folder that does not exist: /no/such"),
        ):
            with self.subTest(arguments):
                result = script(*arguments)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(text, result.stderr)
                self.assertIn("to do:", result.stderr)

    def test_another_libtorch_is_refused_by_both_versions(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(f"{folder}/share/cmake/Torch")
            with open(f"{folder}/share/cmake/Torch/TorchConfigVersion.cmake", "w") as out:
                out.write('set(PACKAGE_VERSION "2.9.1")\n')
            result = script("setup", "--libtorch", folder)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("is LibTorch 2.9.1; 2.11.0 is needed", result.stderr)


class PackageSources(unittest.TestCase):
    def test_one_line_entries(self):
        text = (
            "# deb mirror bookworm main\n"
            "deb [signed-by=/k.gpg arch=amd64] mirror:/debian bookworm main contrib\n"
            "deb mirror:/debian bookworm-updates main\n"
            "deb-src mirror:/debian bookworm main\n"
            "deb mirror:/other trixie main\n"
        )
        self.assertEqual(
            list(fetch_debs.one_line_entries(text, "bookworm", "bookworm-backports")),
            ["deb [signed-by=/k.gpg arch=amd64] mirror:/debian bookworm-backports main contrib"],
        )

    def test_stanzas(self):
        text = (
            "Types: deb deb-src\n# a comment, not the end of the stanza\nURIs: mirror:/debian\nSuites: bookworm bookworm-updates\n"
            "Components: main\nSigned-By:\n -----BEGIN\n .\n abc\n\n"
            "Types: deb\nURIs: mirror:/security\nSuites: bookworm-security\nComponents: main\n\n"
            "Enabled: no\nTypes: deb\nURIs: mirror:/off\nSuites: bookworm\nComponents: main\n\n"
            "Types: deb-src\nURIs: mirror:/sources\nSuites: bookworm\nComponents: main\n"
        )
        (stanza,) = fetch_debs.deb822_entries(text, "bookworm", "bookworm-backports")
        self.assertEqual(
            stanza.splitlines(),
            ["types: deb", "uris: mirror:/debian", "suites: bookworm-backports", "components: main", "signed-by: ", " -----BEGIN", " .", " abc"],
        )

    def test_no_source_is_an_error_that_names_the_release(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(fetch_debs.Failure, "bookworm"):
            fetch_debs.write_sources(folder, folder, "bookworm", ["bookworm"])

    def test_the_list_is_readable(self):
        packages = fetch_debs.read_list(f"{ROOT}/scripts/lib/debian-packages.txt")
        self.assertGreaterEqual(len(packages), 5)
        self.assertTrue(all(len(package[3]) == 64 for package in packages))


class Tally(unittest.TestCase):
    def total(self, entries, records):
        """What scripts/test would print last, and its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            lines = "".join(f'<testcase name="{name}" status="{status}">{inner}</testcase>' for name, status, inner in entries)
            with open(f"{folder}/ctest.xml", "w") as out:
                out.write(f"<testsuite>{lines}</testsuite>")
            for name, text in records.items():
                with open(f"{folder}/{name}.xml", "w") as out:
                    out.write(text)
            result = subprocess.run([sys.executable, tally.__file__, folder], stdout=subprocess.PIPE, text=True)
        return result.stdout.splitlines()[-1], result.returncode

    def test_entries_and_cases_add_up(self):
        record = '<OverallResults successes="9" failures="0"/><OverallResultsCases successes="4" failures="0" expectedFailures="1" skips="2"/>'
        self.assertEqual(self.total([("quick", "run", ""), ("layers", "run", "")], {"quick": record}), ("6 passed, 0 failed, 2 skipped", 0))

    def test_a_failed_case_and_a_failed_entry(self):
        record = '<OverallResultsCases successes="4" failures="1" expectedFailures="0"/>'
        entries = [("quick", "fail", "<failure/>"), ("layers", "fail", "<failure/>")]
        self.assertEqual(self.total(entries, {"quick": record}), ("4 passed, 2 failed", 1))

    def test_a_program_that_died_fails_in_the_case_it_died_in(self):
        record = '<TestCase><OverallResult success="true"/></TestCase><TestCase name="x">'
        self.assertEqual(self.total([("quick", "fail", "<failure/>")], {"quick": record}), ("1 passed, 1 failed", 1))

    def test_a_program_that_failed_after_its_cases(self):
        record = '<OverallResultsCases successes="4" failures="0" expectedFailures="0"/>'
        self.assertEqual(self.total([("quick", "fail", "<failure/>")], {"quick": record}), ("4 passed, 1 failed", 1))

    def test_no_test_at_all_is_a_failure(self):
        self.assertEqual(self.total([], {}), ("0 passed, 0 failed", 1))


class Bench(unittest.TestCase):
    def test_losses_that_differ_are_named_and_no_time_counts(self):
        bench.check_losses("a", [2.0, 1.0001], "b", [2.0, 1.0])
        for losses, text in (
            ([2.0, 1.0003], "losses differ: at step 1 that of a is 1.0003000, that of b 1.0000000"),
            ([float("nan"), 1.0], "losses differ: at step 0"),
            ([2.0], "a has 1 losses, b 2"),
        ):
            with self.subTest(losses), self.assertRaisesRegex(bench.Failure, text):
                bench.check_losses("a", losses, "b", [2.0, 1.0])

    def measure(self, *losses):
        """Contestants whose third and last step has these losses."""
        everybody = [bench.Contestant("libfsdp", "FULL_SHARD", backend, []) for backend in ("gloo", "none", "gloo")]
        report = {"world_size": 1, "step_ms": 10, "tokens_per_s": 100, "peak_rss_mb": 50, "startup_s": 1, "step_times_ms": [8, 10, 14]}
        bench.measure(everybody, 2, lambda one: {**report, "losses": [3, 2, losses[everybody.index(one)]]})
        return everybody

    def test_rows_have_the_fields_that_readers_know(self):
        row = bench.row(self.measure(1.5, 9, 1.5)[0])
        self.assertEqual(
            row,
            {"workload": "W1", "system": "libfsdp", "strategy": "FULL_SHARD", "backend": "gloo", "world_size": 1, "step_ms": 10,
             "step_ms_spread": 4.5, "tokens_per_s": 100, "peak_rss_mb": 50, "startup_s": 1, "final_loss": 1.5})  # fmt: skip

    def test_rounds_are_left_out_when_time_is_short(self):
        one = bench.Contestant("libfsdp", "FULL_SHARD", "gloo", [])
        bench.measure([one], 5, lambda _: {"losses": [1], "step_times_ms": [1]}, seconds=1e-9)
        self.assertEqual(len(one.reports), 1)

    def test_a_contestant_that_computes_something_else_ends_the_run(self):
        with self.assertRaisesRegex(bench.Failure, "losses differ: at step 2"):
            self.measure(1.5, 9, 1.6)


unittest.main(verbosity=1)
