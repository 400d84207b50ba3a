"""Adds up what one run of ctest did, and prints it as the line that ends a test run.

    python3 tally.py RESULTS_DIR

RESULTS_DIR has ctest.xml (ctest's own record) and NAME.xml (Catch2's record in its "xml" form) for each entry NAME that runs test cases
of the test program. Such an entry counts its cases, any other entry counts one. Exit code 0 only if something passed and nothing failed.
"""

import os
import re
import sys
import xml.etree.ElementTree


def cases(path, entry_passed):
    with open(path, errors="replace") as file:
        text = file.read()
    totals = re.search(r'<OverallResultsCases successes="(\d+)" failures="(\d+)" expectedFailures="(\d+)"(?: skips="(\d+)")?', text)
    if totals:
        passed, failed, expected, skipped = (int(n or 0) for n in totals.groups())
        # A program that ran all cases and still failed did so on its way out.
        return passed + expected, failed or int(not entry_passed), skipped
    # The program died: what was finished counts, and the case that it died in has failed.
    return len(re.findall(r'<OverallResult success="true"', text)), 1 + len(re.findall(r'<OverallResult success="false"', text)), 0


def main(results):
    passed = failed = skipped = 0
    for entry in xml.etree.ElementTree.parse(f"{results}/ctest.xml").getroot().iter("testcase"):
        entry_passed = entry.get("status") == "run"
        record = f"{results}/{entry.get('name')}.xml"
        if entry.find("skipped") is not None:
            counts = (0, 0, 1)
        elif os.path.exists(record):
            counts = cases(record, entry_passed)
        else:
            counts = (int(entry_passed), int(not entry_passed), 0)
        if counts[1]:
            print(f"failed: {entry.get('name')} ({counts[1]})")
        passed, failed, skipped = passed + counts[0], failed + counts[1], skipped + counts[2]
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
