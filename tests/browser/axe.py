"""What axe finds on a page for people who do not see it, or use no mouse."""

import pytest


def serious(page, context=None, **options):
    """{rule: places} of the violations that axe calls serious or critical. context: the part of the page to check."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    results = axe.run(page, context=context, options={"resultTypes": ["violations"], **options})
    return {
        violation["id"]: [f"{node['html'][:200]} {node['failureSummary'][:200]}" for node in violation["nodes"][:3]]
        for violation in results.response["violations"]
        if violation["impact"] in ("serious", "critical")
    }
