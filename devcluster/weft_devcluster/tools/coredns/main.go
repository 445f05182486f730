// CoreDNS with what the Corefile of a test node names and nothing else: the rest is mostly clients of clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func init() { dnsserver.Directives = []string{"bind", "errors", "ready", "template", "kubernetes"} }

func main() { coremain.Run() }
