"""Tests of the explorer's page in a browser, as a reader sees it."""

import pytest

pytest.register_assert_rewrite("tests.browser.checks", "tests.browser.reader")
