//go:build tools

// Package tools names the store that a test cluster's API server stands on.
package tools

import _ "go.etcd.io/etcd/server/v3"
