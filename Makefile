# `make` lists the targets. Everything that is downloaded or built lands in .tools/ and bin/, which git ignores.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Without it the client of one object store brings a service mesh along.
export GOFLAGS := -tags=disable_grpc_modules
GOLANGCI_VERSION := v2.12.2
GORELEASER_VERSION := v2.14.0
CYCLONEDX_VERSION := v1.10.0
VULN_VERSION := v1.9.0
GOLANGCI := .tools/golangci-lint-$(GOLANGCI_VERSION)
# Findings are cached with the paths of the tree they were found in, so each tree has its own cache.
export GOLANGCI_LINT_CACHE := $(CURDIR)/.tools/lint-cache
FUZZTIME ?= 3s
TESTTIME ?= 12m
ARGS ?=

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

.PHONY: build
build: ## build bin/koldproxy
	@mkdir -p bin
	go build -o bin/koldproxy ./cmd/koldproxy

.PHONY: demo
demo: setup build ## run a private PostgreSQL with koldproxy in front (ARGS='--tour' runs the README's tour)
	@exec ./bin/koldproxy demo $(ARGS)

.PHONY: test
test: setup-test fmt-check lint fuzz ## run everything that must pass: format, lint, short fuzzing, all tests with the race detector
	@.ci/test $(TESTTIME)
	@echo "make test: everything passed"

.PHONY: test-long
test-long: setup-long ## the same with long fuzzing and long tests, PostgreSQL's own suites, and all supported versions of PostgreSQL
	KOLDPROXY_TEST_LONG=1 $(MAKE) test FUZZTIME=60s TESTTIME=90m
	KOLDPROXY_TEST_EVENT_LOOPS=-1 go test -race -timeout 90m ./proxy
	KOLDPROXY_TEST_LONG=1 KOLDPROXY_PROXY_EVENT_LOOPS=-1 go test -race -timeout 90m -run 'Drivers|Suites|Pgbench|Archives|Dump|Replication|Traces' ./integration
	cd integration/cold && go test -race -timeout 90m ./...
	$(MAKE) test-versions

.PHONY: test-versions
test-versions: setup-test ## run the tests that need a server on PostgreSQL 16, 17 and 18 (VERSIONS='18' for one)
	@.ci/test-versions $(VERSIONS)

# PostgreSQL's scanner is C; what is only looked at or fuzzed need not wait for its optimised build.
lint fuzz: export CGO_CFLAGS := -O0

.PHONY: lint
lint: $(GOLANGCI) ## golangci-lint, with go vet's checks among its own
	$(GOLANGCI) run ./...

.PHONY: fmt
fmt: $(GOLANGCI) ## format the Go files
	$(GOLANGCI) fmt ./...

.PHONY: fmt-check
fmt-check: $(GOLANGCI)
	$(GOLANGCI) fmt --diff ./...

.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZTIME (default 3s)
	@.ci/fuzz $(FUZZTIME)

.PHONY: bench-cold
bench-cold: setup ## measure flushes, sizes and cold pages beside DuckDB (ARGS='-cold.rows 10000000' for more rows)
	cd integration/cold && go test -run '^$$' -bench Cold -benchtime 1x -timeout 2h . $(ARGS)

.PHONY: bench-apply
bench-apply: setup build ## compare the applier with PostgreSQL's own subscriber on the same log (ARGS='-scale 1')
	@go run ./internal/benchapply $(ARGS)

.PHONY: bench-streams
bench-streams: setup build ## measure streams: applying with 0 to 100 of them, live push, replay, sweeps (ARGS='-scale 1')
	@go run ./internal/benchapply -only streams,push,fanout,replay,sweep $(ARGS)

.PHONY: bench-proxy
bench-proxy: setup build ## compare queries, logins, COPY and memory directly, through PgBouncer and through koldproxy (ARGS=--help)
	@.ci/bench-proxy $(ARGS)

.PHONY: release-dry
release-dry: ## build everything that a release has, and publish nothing (dist/; needs gcc-aarch64-linux-gnu)
	GOFLAGS= go run github.com/goreleaser/goreleaser/v2@$(GORELEASER_VERSION) check
	GOFLAGS= go run github.com/goreleaser/goreleaser/v2@$(GORELEASER_VERSION) release --snapshot --clean --skip=publish

.PHONY: sbom
sbom: build ## list what the binary is made of, in CycloneDX (bin/koldproxy.cdx.json)
	GOFLAGS= go run github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX_VERSION) bin -json -output bin/koldproxy.cdx.json bin/koldproxy

.PHONY: vuln
vuln: ## ask the Go project's database for flaws in what is linked in (needs vuln.go.dev)
	go run golang.org/x/vuln/cmd/govulncheck@$(VULN_VERSION) ./...

.PHONY: setup
setup: ## install what the demo needs and lacks: PostgreSQL binaries, a C compiler, Go modules
	@.ci/setup demo

.PHONY: setup-test
setup-test: ## install what the tests need and lack: the same, MQTT clients and the drivers of several languages
	@.ci/setup test

.PHONY: setup-long
setup-long: setup-test ## install what the long tests need and lack: the same, Java, the sources of PostgreSQL's own suites
	@.ci/setup long

.PHONY: clean
clean: ## remove what was built
	rm -rf bin .tools

$(GOLANGCI):
	@mkdir -p .tools
	@echo "building golangci-lint $(GOLANGCI_VERSION) (once, a few minutes)"
	GOBIN=$(CURDIR)/.tools/new go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	@mv .tools/new/golangci-lint $@ && rmdir .tools/new
