// Command grafana_schema reads dashboards (files) as Grafana's own schema has them, and prints each fault: a field
// that is unknown or missing, of a panel and of a Prometheus query, too, or a value of a wrong type.
package main

import (
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func check(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var read dashboard.Dashboard
	// The schema's list of errors is not nil where it is empty.
	if err := read.UnmarshalJSONStrict(raw); err != nil && err.Error() != "" {
		return err
	}
	return read.Validate()
}

func main() {
	plugins.RegisterDefaultPlugins()
	failed := false
	for _, path := range os.Args[1:] {
		if err := check(path); err != nil {
			fmt.Printf("%s: %v\n", path, err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}
