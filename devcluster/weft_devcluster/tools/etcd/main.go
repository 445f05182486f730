// The store that the API server of a test cluster stands on, as it is: built beside Kubernetes, which shares its packages.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
