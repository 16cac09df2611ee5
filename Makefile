# `make` lists the targets. PYTHON=python3.12 chooses another interpreter for the virtual environment.
PYTHON ?= python3
BENCH ?= consume
SPARK ?= 4.0 4.1
DELTA ?= 4.4.0
RUN := .venv/bin
LOCK := uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of interpreters, and each would compile all modules again

# Install an extra into the virtual environment, once per change of the metadata.
.venv/.%: setup.cfg setup.py pyproject.toml pyrocket_consumer/protocol/_accelerator.c | .venv/bin/python
	$(RUN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

# The environment of CI: the versions and files of .ci/lock.txt, for every extra that tests need.
.PHONY: locked
locked: | .venv/bin/python
	$(RUN)/python -m pip install --quiet --require-hashes --requirement .ci/lock.txt
	$(RUN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch .venv/.cli .venv/.dev .venv/.docs .venv/.spark .venv/.sql .venv/.test

.venv/audit/bin/pip-audit: .ci/lock-audit.txt | .venv/bin/python
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --require-hashes --requirement .ci/lock-audit.txt
	@touch $@

.venv/uv/bin/uv:
	$(PYTHON) -m venv .venv/uv
	.venv/uv/bin/python -m pip install --quiet uv

.venv/constraints.txt: .ci/lock.txt | .venv/bin/python
	@grep -E '^[a-z]' $< | grep -vE '^(pyspark|py4j)==' | sed 's/\\$$//' > $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.PHONY: help quick pythons test proof search releases real-time coverage pure system-packages java check hooks changelog docs docs-serve pictures audit lock oldest wheel demo spark-demo bench compare soak fuzz hostile spark-soak spark-versions spark-connect clean
.DEFAULT_GOAL := help

help:  ## print this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

quick: .venv/.test  ## run the unit tests, which are pure or use virtual time, in 90 seconds (ARGS='-k offsets')
	$(RUN)/python -m pytest -q -n auto -m unit --real=none $(ARGS)

pythons: .venv/.test .venv/uv/bin/uv  ## run the unit tests on the other Pythons of this machine; .ci/pythons 3.14 unpacks one (ARGS='-k offsets')
	@$(RUN)/python -m tests.interpreters --others | while read -r version python; do \
	    echo "--- Python $$version, $$python"; \
	    { [ -x .venv/python-$$version/bin/python ] || .venv/uv/bin/uv venv --quiet --python $$python .venv/python-$$version; } && \
	    .venv/uv/bin/uv pip install --quiet --python .venv/python-$$version --require-hashes --requirement .ci/lock.txt && \
	    PYROCKET_PURE=1 .venv/uv/bin/uv pip install --quiet --python .venv/python-$$version --no-build-isolation --no-deps --editable . && \
	    .venv/python-$$version/bin/python -m pytest -q -n auto -m unit --real=none $(ARGS) </dev/null || exit 1; \
	done

test: .venv/.test  ## run all tests; with Java and Maven also Spark, and the oldest and newest real broker (ARGS='-k offsets --real=none')
	$(RUN)/python -m pytest -q -n auto $(ARGS)

proof: search releases real-time coverage  ## run these four, in about 75 minutes; make proof -k continues after a failure

search: .venv/.test  ## run all of the random search, in 20 minutes (ARGS='-k clustering')
	PYROCKET_TRIALS=1 $(RUN)/python -m pytest -q -n auto -m search --real=none -o faulthandler_timeout=0 $(ARGS)

releases: .venv/.test  ## run all other tests, on all broker releases, in 25 minutes (ARGS='-k offsets')
	PYROCKET_TRIALS=1 $(RUN)/python -m pytest -q -n auto -m 'not search' --real=all $(ARGS)

real-time: .venv/.test  ## run the unit tests with real threads, sockets and sleeps (ARGS='-k offsets')
	$(RUN)/python -m pytest -q -n auto -m unit --real=none --real-time $(ARGS)

coverage: .venv/.test  ## report the branches of the product that the unit tests reach (ARGS='-k offsets')
	$(RUN)/python -m coverage erase
	COVERAGE_PROCESS_START=setup.cfg PYROCKET_LIMIT_S=60 $(RUN)/python -m coverage run -m pytest -q -n auto -m unit --real=none $(ARGS)
	$(RUN)/python -m coverage combine -q
	$(RUN)/python -m coverage report

pure: .venv/.test  ## run the tests of the protocol, a consumer and a producer without the compiled part (ARGS='-k offsets')
	PYROCKET_PURE=1 $(RUN)/python -m pytest -q -n auto --real=none $(ARGS) --ignore tests/protocol/test_accelerator_builds.py \
	    tests/protocol tests/conformance/test_clustering.py tests/producer/test_sending.py

system-packages:  ## install Java and Maven for Spark and real brokers, PostgreSQL, MariaDB and a C compiler, as root or with sudo
	@.ci/system-packages

java:
	@"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version >/dev/null 2>&1 || { \
	    echo "Java 17 or newer is needed, and was not found; 'make system-packages' installs it" >&2; exit 1; }

check: .venv/.dev  ## run ruff and mypy --strict, and check the English and the news fragments
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/mypy
	$(RUN)/python -m tests.english
	$(RUN)/towncrier build --draft --version next >/dev/null

hooks: .venv/.dev  ## install a git hook that checks each commit with ruff, mypy, plain English and whitespace
	$(RUN)/pre-commit install

changelog: .venv/.dev  ## print the next section of CHANGELOG.md; make changelog VERSION=0.2.0 writes it and removes the fragments
	@$(RUN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version next)

docs: .venv/.docs  ## build the documentation in site/; fails on a warning or a broken link
	@NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict $(ARGS)  # with --quiet no warning counts
	@$(RUN)/python -m tests.site site

docs-serve: .venv/.docs  ## serve the documentation on http://127.0.0.1:8000 and rebuild it after each change (ARGS='--dev-addr 127.0.0.1:8080')
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs serve $(ARGS)

pictures: .venv/.test  ## redraw the pictures of docs/design.md; needs Graphviz (apt-get install graphviz)
	$(RUN)/python -m tests.pictures

audit: .venv/.test .venv/audit/bin/pip-audit  ## list known vulnerabilities of the versions that CI installs, from PyPI's database if available
	$(RUN)/python -m tests.audit --pip-audit .venv/audit/bin/pip-audit

lock:  ## update the versions that CI installs to the newest ones, for every Python, with their hashes
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install --quiet uv
	.venv/lock/bin/$(LOCK) --extra dev --extra docs setup.cfg --output-file .ci/lock.txt
	echo pip-audit | .venv/lock/bin/$(LOCK) - --output-file .ci/lock-audit.txt

oldest:  ## run the unit and live tests with the oldest versions that setup.cfg allows (ARGS='-k offsets')
	$(PYTHON) -m venv .venv/oldest
	.venv/oldest/bin/python -m pip install --quiet uv
	.venv/oldest/bin/uv pip compile --quiet --resolution lowest-direct --no-annotate --extra test setup.cfg --output-file .venv/oldest.txt
	.venv/oldest/bin/python -m pip install --quiet --requirement .venv/oldest.txt
	.venv/oldest/bin/python -m pytest -q -n auto -m 'unit or live' --real=none $(ARGS)

wheel: .venv/.dev  ## build the source distribution, and the wheel from it, in dist/, and check both with twine
	@rm -rf build dist
	$(RUN)/python -m build --quiet --no-isolation
	$(RUN)/twine check --strict dist/*
	@$(RUN)/python -m zipfile -l dist/*.whl | grep '_accelerator[.]' >/dev/null || echo "the wheel has no compiled part, because there is no C compiler or PYROCKET_PURE is set" >&2

demo: .venv/.cli .venv/.sql  ## produce and consume on the embedded broker, or on a real one: make demo BROKER=5.5.0
ifdef BROKER
	$(RUN)/python -m tests.real_brokers --version $(BROKER) -- $(RUN)/pyrocket demo $(ARGS)
else
	$(RUN)/pyrocket demo $(ARGS)
endif

spark-demo: java .venv/.spark  ## count in windows with PySpark, from a topic to a topic (ARGS='--seconds 30 --rate 2000')
	$(RUN)/python -m pyrocket_consumer.spark.demo $(ARGS)

bench: .venv/.test  ## run a benchmark and print ratios as a table: make bench BENCH=consume|order_by_key|exactly_once|offset_persist|start_close|decode|cores|produce|drop_in|spark_read|spark_pushdown|spark_write ARGS=--quick
	$(RUN)/python -m benchmarks.$(BENCH) $(ARGS)

compare: .venv/.test  ## check whether this commit is slower than an earlier one, in a quarter of an hour: make compare BASE=main~10 ARGS='--only consume,latency'
	@$(RUN)/python -m benchmarks.compare $(BASE) $(ARGS)

soak: .venv/.test  ## test for hours with faults: 20 000 simulated worlds, interruptions at every step, 100 000 crash points of the offset store
	$(RUN)/python -m tests.simulation --seeds 0-999
	$(RUN)/python -m tests.simulation.every_await
	$(RUN)/python -m tests.simulation.producing --seeds 0-999
	PYROCKET_TRIALS=100 $(RUN)/python -m pytest --real=none tests/consumer/lifecycle/test_random_calls.py tests/producer/test_random_calls.py --timeout 20000
	PYROCKET_TRIALS=15 $(RUN)/python -m pytest --real=none tests/offsets --timeout 20000
	$(RUN)/python -m tests.exactly_once.killing --messages 200000 --rate 1000 --version 5.5.0 --database postgresql

fuzz: .venv/.test  ## fuzz every decoder for a minute (ARGS='--executions 10000000 --seconds 3600', or --help)
	@$(RUN)/python -c 'import atheris' 2>/dev/null || $(RUN)/python -m pip install --quiet atheris || echo "atheris does not install here, so mutations are random only"
	$(RUN)/python -m tests.fuzz $(ARGS)

hostile: .venv/.test  ## run a consumer against a malicious server, 5 s for each attack (ARGS='--seconds 3600', or --help)
	$(RUN)/python -m tests.hostile $(ARGS)

spark-soak: java .venv/.test  ## kill a streaming query eight times, and run a writing query with faulty brokers; no row may be lost
	PYROCKET_SPARK_KILLS=8 PYROCKET_SPARK_MESSAGES=80000 $(RUN)/python -m pytest --real=none -s -o faulthandler_timeout=0 tests/spark/test_killed_query.py
	PYROCKET_SPARK_TROUBLES=12 PYROCKET_SPARK_MESSAGES=60000 $(RUN)/python -m pytest --real=none -s -o faulthandler_timeout=0 tests/spark/test_faulty_brokers.py

spark-versions: java .venv/.test .venv/constraints.txt  ## run the Spark tests with older releases, and with Delta: make spark-versions SPARK="4.0 4.1"
	for version in $(SPARK); do \
	    $(PYTHON) -m venv .venv/spark-$$version && \
	    .venv/spark-$$version/bin/python -m pip install --quiet --constraint .venv/constraints.txt \
	        --editable '.[test]' "pyspark==$$version.*" && \
	    CI=true PYROCKET_SPARK_DELTA=io.delta:delta-spark_$${version}_2.13:$(DELTA) .venv/spark-$$version/bin/python -m pytest -q \
	        --real=none -m "spark_versions or spark_delta" $(ARGS) tests/spark || exit 1; \
	done

spark-connect: java .venv/.test  ## run the Spark tests with Spark Connect
	$(RUN)/python -m pip install --quiet 'pyspark[connect]'
	CI=true $(RUN)/python -m pytest -q --real=none -m spark_connect tests/spark

clean:  ## remove the virtual environment and all build results
	rm -rf .venv build dist site *.egg-info
