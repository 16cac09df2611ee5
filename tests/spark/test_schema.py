"""The columns that can be read."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.columns import COLUMNS
from pyrocket_consumer.spark.data_source import READ_SCHEMA, project_schema
from pyrocket_consumer.spark.task_reader import arrow_schema
from tests.for_each import for_each


def test_the_schema_is_as_documented():
    assert READ_SCHEMA.simpleString() == (
        "struct<topic:string,brokerName:string,queueId:int,queueOffset:bigint,msgId:string,tags:string,keys:string,"
        "body:binary,properties:map<string,string>,flag:int,sysFlag:int,reconsumeTimes:int,"
        "bornTimestamp:timestamp,storeTimestamp:timestamp,bornHost:string,storeHost:string>"
    )
    assert tuple(READ_SCHEMA.names) == COLUMNS
    assert project_schema(None) == project_schema(READ_SCHEMA) == READ_SCHEMA, (
        "all columns are read when none are asked for"
    )


def test_columns_are_read_in_the_order_of_the_schema():
    schema = StructType([READ_SCHEMA["body"], READ_SCHEMA["queueOffset"]])
    assert project_schema(schema) == schema
    assert arrow_schema(schema) == pa.schema([("body", pa.binary()), ("queueOffset", pa.int64())])


def test_a_column_without_nulls_may_be_declared_not_null():
    schema = StructType([StructField("topic", StringType(), False)])
    assert arrow_schema(project_schema(schema)) == pa.schema([pa.field("topic", pa.string(), nullable=False)])
    values = StructType([StructField("properties", MapType(StringType(), StringType(), False), False)])
    assert project_schema(values) == values


@for_each(
    "fields, expected",
    [
        ([], "the schema has no column; name at least one of topic string, brokerName string, queueId int,"),
        ([StructField("value", StringType())], "column 'value' is unknown; there are topic string"),
        ([StructField("Body", StringType())], "column 'Body' is unknown"),
        ([StructField("body", StringType())], "column 'body' is binary, not string; there are"),
        ([StructField("queueOffset", IntegerType())], "column 'queueOffset' is bigint, not int"),
        ([StructField("properties", MapType(StringType(), IntegerType()))], "is map<string,string>, not"),
        ([StructField("topic", StringType())] * 2, "column 'topic' is named twice"),
        ([StructField("tags", StringType(), False)], "column 'tags' is null for a message without one"),
    ],
)
def test_anything_else_is_an_error_that_names_the_columns(fields, expected):
    with pytest.raises(ConfigError) as raised:
        project_schema(StructType(fields))
    assert expected in str(raised.value)
