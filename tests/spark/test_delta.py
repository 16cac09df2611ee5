"""Write to a Delta table exactly once, by the recipe of the page, with repeated batches.

Delta is published for releases of Spark one by one, so this runs where others do not: `make spark-versions`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.spark.test_foreach_batch import Crashing, crash, expected, orders, run
from tests.spark.test_spark_docs import BLOCKS

__all__ = ["orders"]


@pytest.mark.spark_delta
def test_a_delta_table_has_every_message_once(spark: Any, orders: Any, tmp_path: Any) -> None:
    (block,) = [block for block in BLOCKS if "txnAppId" in block]
    recipe = re.sub(r"\nquery = .*", "", block, flags=re.DOTALL).replace("/data", str(tmp_path))
    names: dict[str, Any] = {}
    exec(recipe, names)
    crashing = Crashing(names["append"], {1: crash}, {0, 2})
    assert run(spark, orders, tmp_path, crashing) == 3
    assert crashing.began.count(0) == crashing.began.count(2) == 2
    table = spark.read.format("delta").load(str(tmp_path / "orders"))
    assert sorted(row.body.decode() for row in table.select("body").collect()) == sorted(expected().elements())
