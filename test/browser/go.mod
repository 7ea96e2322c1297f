// Tests the page of kubectl gpusharing dashboard in a real browser, in a module of its own so that what it needs moves no version of the
// operator. Run it with make browser-test.
module github.com/gpusharing/gpu-sharing-operator/test/browser

go 1.26.0

require github.com/gpusharing/gpu-sharing-operator v0.0.0

replace github.com/gpusharing/gpu-sharing-operator => ../..

require (
	github.com/chromedp/cdproto v0.159.0
	github.com/chromedp/chromedp v0.23.0
	github.com/onsi/gomega v1.40.0
	k8s.io/utils v0.0.0-20260626114624-be93311217bd
)

require (
	github.com/go-json-experiment/json v0.0.0-20260213210345-44df1a37e875 // indirect
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/kr/text v0.2.0 // indirect
	github.com/rogpeppe/go-internal v1.14.1 // indirect
	go.yaml.in/yaml/v3 v3.0.4 // indirect
	golang.org/x/net v0.57.0 // indirect
	golang.org/x/text v0.40.0 // indirect
	gopkg.in/check.v1 v1.0.0-20201130134442-10cb98267c6c // indirect
)
