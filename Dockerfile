# A static koldproxy in an empty image: docker build -t koldproxy .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# PostgreSQL's parser is C. Name lookups are Go's own (netgo, osusergo), so that glibc can be linked in.
RUN CGO_ENABLED=1 go build -trimpath -tags netgo,osusergo,disable_grpc_modules -ldflags '-s -w -linkmode external -extldflags "-static"' -o /koldproxy ./cmd/koldproxy \
	&& install -d -o 65532 -g 65532 -m 0700 /empty/var/lib/koldproxy/cold /empty/tmp

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /koldproxy /usr/bin/koldproxy
COPY --from=build --chown=65532:65532 /empty/ /
USER 65532:65532
EXPOSE 6543 1883 9632
ENTRYPOINT ["/usr/bin/koldproxy"]
CMD ["serve", "--config", "/etc/koldproxy/koldproxy.toml"]
